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

from base import errors

if __name__ == "__main__":
    errors.begin_program()

from base.cli import Parser, whole_number
from base.errors import FileError, UserError, exit_with

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


FIRST = (
    "Once upon a time there was a little {child} called {name}.",
    "One day a little {child} called {name} went to the {place}.",
    "{name} was a little {child} who lived near the {place}.",
)
LAST = (
    "In the evening {name} went home and slept well.",
    "{name} told {his} mother all about it.",
    "They lived happily ever after.",
    "It was the best day of {name}'s life.",
)
# The sentences between the first one and the last one.
PLOTS = (
    (  # a toy is lost, looked for and found
        "{name} had a {color} {toy} and played with it every day.",
        "But that day the {toy} was gone, and {name} was sad.",
        '"Where is my {toy}?" {he} asked.',
        '"I will help you," said {helper}.',
        "They looked for a long time. Then {helper} found the {toy} {hiding}.",
        '"Thank you!" said {name}. {He} was {mood}.',
    ),
    (  # an animal is hurt, is helped, and stays
        "In the {place} {he} saw a {color} {animal}.",
        "The {animal} was hungry and could not find its home.",
        '"Do not be afraid," said {name}, and gave the {animal} some {food}.',
        "The {animal} ate all of the {food} and was {mood}.",
        "From that day on {name} and the {animal} were friends.",
    ),
    (  # two children want the same thing, and share it
        "{name} and {helper} both wanted to play with the {color} {toy}.",
        '"It is mine!" said {name}. "No, it is mine!" said {helper}.',
        "{His} mother heard them and came to the {place}.",
        '"You can share the {toy}," she said.',
        "So {name} played first, and then {helper} played.",
        "It was more fun to play together, and they were both {mood}.",
    ),
    (  # something is too high or too far, and is reached in the end
        "{name} wanted to find the {color} {animal} that lived {hiding}.",
        "It was dark there, and {he} was afraid.",
        '"Hold my hand," said {helper}, "and we will go together."',
        "They walked and walked until they saw the {animal}.",
        '"Hello," said the {animal}. "Would you like some {food}?"',
        "They all ate {food}, and {name} was not afraid any more.",
    ),
    (  # a gift is made for a birthday
        "It was the birthday of {helper}, and {name} had no gift.",
        "{He} thought for a long time. Then {he} had an idea.",
        "{He} made a {color} {toy} and put it in a box.",
        '"Is this for me?" asked {helper}. "Yes," said {name}, "I made it."',
        "{helper} loved the {toy}, and they ate {food} in the {place}.",
    ),
)


def story(draw: random.Random) -> str:
    """A story whose parts are the same from its first sentence to its last."""
    girl = draw.random() < 0.5
    name = draw.choice(GIRLS if girl else BOYS)
    child, he, his = ("girl", "she", "her") if girl else ("boy", "he", "his")
    lists = {"animal": ANIMALS, "place": PLACES, "toy": TOYS, "color": COLORS, "weather": WEATHER}
    lists |= {"mood": MOODS, "hiding": HIDING, "food": FOODS}
    parts = {key: draw.choice(words) for key, words in lists.items()}
    names = GIRLS if draw.random() < 0.5 else BOYS
    helper = draw.choice([other for other in names if other != name])
    parts |= {"name": name, "child": child, "he": he, "his": his, "helper": helper}
    parts |= {"He": he.capitalize(), "His": his.capitalize()}
    plot = draw.choice(PLOTS)
    last = draw.choice(LAST)
    sentences = [draw.choice(FIRST), "{weather}", *plot, last]
    return " ".join(sentences).format(**parts)


def write_stories(path: Path, count: int, seed: int) -> None:
    """Write `count` stories to a JSON Lines file; UserError if it cannot be written."""
    draw = random.Random(seed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            for _ in range(count):
                file.write(json.dumps({"text": story(draw)}) + "\n")
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from None


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
