"""The demo's corpus: if this failed, the demo would train on texts that make no sense."""

import json
import tomllib

from ranks import ROOT

from scripts import make_stories


def stories(path, count: int, seed: int) -> list[str]:
    make_stories.write_stories(path, count, seed)
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_the_same_seed_gives_the_same_stories(tmp_path):
    first = stories(tmp_path / "a.jsonl", 50, seed=1)
    assert len(first) == 50
    assert len(set(first)) == 50
    assert stories(tmp_path / "b.jsonl", 50, seed=1) == first
    assert stories(tmp_path / "c.jsonl", 50, seed=2) != first


def test_a_story_is_about_one_child(tmp_path):
    """A boy is called he, a girl she, and no third child appears."""
    names = {*make_stories.GIRLS, *make_stories.BOYS}
    for text in stories(tmp_path / "a.jsonl", 300, seed=3):
        words = text.replace(".", " ").replace(",", " ").replace("'", " ").split()
        children = [word for word in words if word in names]
        assert 1 <= len(set(children)) <= 2, text
        wrong = {"he", "his", "He", "His"} if " girl " in text else {"her", "She", "Her"}
        assert not wrong & set(words), text


def test_the_demo_trains_on_the_stories():
    """demo.sh makes the corpus that demo.toml names, with the vocabulary that demo.toml has."""
    options = tomllib.loads((ROOT / "scripts/demo.toml").read_text())
    script = (ROOT / "scripts/demo.sh").read_text()
    assert options["data"]["data"] == ["data/stories"]
    assert f"--out data/stories --vocab-size {options['model']['vocab-size']}" in script
