"""Writes short stories for children, put together from parts, as a corpus for the demo.

    python scripts/make_stories.py --out data/stories.jsonl [--stories 12000] [--seed 1]

Each line of the file is {"text": STORY}. A story has a child, a place, a thing that is wished for
or lost, a friend who helps, and an end that fits its beginning. There are few words and many
combinations, so that a very small model learns in two minutes to tell stories of its own. The same
seed gives the same file.
"""

import json
import random
import sys
from pathlib import Path

# Python puts this script's folder on the path; the modules that it uses are in its parent.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.messages import Parser, UserError, exit_with, whole_number

GIRLS = ("Anna", "Mia", "Lily", "Nora", "Emma", "Zoe", "Clara", "Ida", "Ruth", "Maya")
BOYS = ("Tom", "Ben", "Max", "Leo", "Sam", "Finn", "Paul", "Jack", "Otto", "Noah")
ANIMALS = ("dog", "cat", "rabbit", "duck", "fox", "bear", "mouse", "owl", "frog", "horse")
PLACES = ("park", "garden", "forest", "village", "field", "beach", "school", "farm", "market")
TOYS = ("ball", "kite", "doll", "boat", "drum", "train", "hat", "book", "cup", "lamp")
COLORS = ("red", "blue", "green", "yellow", "white", "brown", "pink", "small", "big", "old")
WEATHER = ("The sun was warm.", "It rained a little.", "The wind was strong.", "Snow fell.")
MOODS = ("happy", "proud", "glad", "full of joy")
HIDING = ("under a tree", "behind a wall", "in the tall grass", "near the river", "on a roof")
FOODS = ("cake", "soup", "bread", "honey", "cheese", "fruit", "rice", "pie")


class Story:
    """The parts that are the same from the first sentence of a story to its last."""

    def __init__(self, draw: random.Random):
        girl = draw.random() < 0.5
        self.draw = draw
        self.name = draw.choice(GIRLS if girl else BOYS)
        self.child = "girl" if girl else "boy"
        self.he = "she" if girl else "he"
        self.his = "her" if girl else "his"
        self.him = "her" if girl else "him"
        self.He = self.he.capitalize()
        self.His = self.his.capitalize()
        self.animal = draw.choice(ANIMALS)
        self.place = draw.choice(PLACES)
        self.toy = draw.choice(TOYS)
        self.color = draw.choice(COLORS)
        self.weather = draw.choice(WEATHER)
        self.mood = draw.choice(MOODS)
        self.hiding = draw.choice(HIDING)
        self.food = draw.choice(FOODS)
        helper_is_girl = draw.random() < 0.5
        names = GIRLS if helper_is_girl else BOYS
        self.helper = draw.choice([name for name in names if name != self.name])

    def opening(self) -> str:
        """Who the story is about, and where it happens."""
        first = self.draw.choice(
            (
                f"Once upon a time there was a little {self.child} called {self.name}.",
                f"One day a little {self.child} called {self.name} went to the {self.place}.",
                f"{self.name} was a little {self.child} who lived near the {self.place}.",
            )
        )
        return f"{first} {self.weather}"

    def lost_and_found(self) -> list[str]:
        """A toy is lost, looked for and found."""
        return [
            f"{self.name} had a {self.color} {self.toy} and played with it every day.",
            f"But that day the {self.toy} was gone, and {self.name} was sad.",
            f'"Where is my {self.toy}?" {self.he} asked.',
            f'"I will help you," said {self.helper}.',
            f"They looked for a long time. Then {self.helper} found the {self.toy} {self.hiding}.",
            f'"Thank you!" said {self.name}. {self.He} was {self.mood}.',
        ]

    def new_friend(self) -> list[str]:
        """An animal is hurt, is helped, and stays."""
        return [
            f"In the {self.place} {self.he} saw a {self.color} {self.animal}.",
            f"The {self.animal} was hungry and could not find its home.",
            f'"Do not be afraid," said {self.name}, and gave the {self.animal} some {self.food}.',
            f"The {self.animal} ate all of the {self.food} and was {self.mood}.",
            f"From that day on {self.name} and the {self.animal} were friends.",
        ]

    def sharing(self) -> list[str]:
        """Two children want the same thing, and share it."""
        return [
            f"{self.name} and {self.helper} both wanted to play with the {self.color} {self.toy}.",
            f'"It is mine!" said {self.name}. "No, it is mine!" said {self.helper}.',
            f"{self.His} mother heard them and came to the {self.place}.",
            f'"You can share the {self.toy}," she said.',
            f"So {self.name} played first, and then {self.helper} played.",
            f"It was more fun to play together, and they were both {self.mood}.",
        ]

    def brave(self) -> list[str]:
        """Something is too high or too far, and is reached in the end."""
        return [
            f"{self.name} wanted to find the {self.color} {self.animal} that lived {self.hiding}.",
            f"It was dark there, and {self.he} was afraid.",
            f'"Hold my hand," said {self.helper}, "and we will go together."',
            f"They walked and walked until they saw the {self.animal}.",
            f'"Hello," said the {self.animal}. "Would you like some {self.food}?"',
            f"They all ate {self.food}, and {self.name} was not afraid any more.",
        ]

    def gift(self) -> list[str]:
        """A gift is made for a birthday."""
        return [
            f"It was the birthday of {self.helper}, and {self.name} had no gift.",
            f"{self.He} thought for a long time. Then {self.he} had an idea.",
            f"{self.He} made a {self.color} {self.toy} and put it in a box.",
            f'"Is this for me?" asked {self.helper}. "Yes," said {self.name}, "I made it."',
            f"{self.helper} loved the {self.toy}, and they ate {self.food} in the {self.place}.",
        ]

    def text(self) -> str:
        """The whole story."""
        plots = (self.lost_and_found, self.new_friend, self.sharing, self.brave, self.gift)
        middle = self.draw.choice(plots)()
        last = self.draw.choice(
            (
                f"In the evening {self.name} went home and slept well.",
                f"{self.name} told {self.his} mother all about it.",
                "They lived happily ever after.",
                f"It was the best day of {self.name}'s life.",
            )
        )
        return " ".join([self.opening(), *middle, last])


def write_stories(path: Path, count: int, seed: int) -> None:
    """Write `count` stories to a JSON Lines file; UserError if it cannot be written."""
    draw = random.Random(seed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            for _ in range(count):
                file.write(json.dumps({"text": Story(draw).text()}) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def main() -> None:
    """Write the stories that the command line asks for; a mistake is exit status 2."""
    parser = Parser(description="Write short stories as a corpus for the demo.")
    parser.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument("--stories", type=whole_number, default=12_000, help="number of stories")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same stories")
    options = parser.parse_args()
    try:
        write_stories(options.out, options.stories, options.seed)
    except UserError as mistake:
        exit_with(mistake)


if __name__ == "__main__":
    main()
