"""What lm_eval.sh needs to know before it evaluates: whether prompts begin with a token, and texts.

    python scripts/eval_texts.py TOKENIZER                 prints True or False
    python scripts/eval_texts.py TOKENIZER texts.jsonl.gz OUT.jsonl
    python scripts/eval_texts.py TOKENIZER --exported FOLDER

The first answer is what lm_eval calls add_bos_token: a model is evaluated in the form in which it
was trained (corpora/encoder.py). With a file of JSON lines its texts are checked as those of a
corpus, and written as JSON lines that are not compressed. With the folder of an exported model, its
names of special tokens become text in lm_eval if they are text in the corpus.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from base import errors  # first: it ends a Python that is too old

if __name__ == "__main__":
    errors.begin_program()

with errors.installed():
    from base.cli import Parser
    from base.errors import CorpusError
    from config.corpus_record import TEXT
    from corpora.encoder import Encoder
    from corpora.text_sources import BadTexts, damage_named, texts_of
    from corpora.tokenizer_files import NAME, load_tokenizer, read_object, read_settings
    from scripts.corpus import run


def write_texts(path: Path, out: str) -> None:
    """Write the texts of JSON lines; UserError with FILE:LINE for a line that has none."""
    with damage_named(path), open(out, "w", encoding="utf-8") as file:
        for text in texts_of(path, "text", BadTexts()):
            file.write(json.dumps({"text": text}) + "\n")


def hide_special_tokens(folder: str) -> None:
    """Have transformers take names of special tokens as text, by the settings in a folder."""
    path = Path(folder, "tokenizer_config.json")
    settings = read_object(str(path)) | {"split_special_tokens": True}
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Print whether prompts begin with a token, and write the texts; raises UserError."""
    parser = Parser.described(__doc__)
    parser.add_argument("tokenizer", metavar="TOKENIZER", help="a tokenizer.json, or its folder")
    parser.add_argument("texts", nargs="?", metavar="FILE", help="JSON lines with a text in each")
    parser.add_argument("out", nargs="?", metavar="OUT", help="the file to write them to")
    parser.add_argument("--exported", metavar="FOLDER", help="the exported model")
    options = parser.parse_args(arguments)
    path = options.tokenizer
    if Path(path).is_dir():
        path = str(Path(path, NAME))
    encoder = Encoder(load_tokenizer(path), read_settings(path), path)
    if options.texts is not None:
        if options.out is None:
            raise CorpusError(f"{options.texts}: name the file to write its texts to")
        write_texts(Path(options.texts), options.out)
    if options.exported is not None and encoder.special_tokens == TEXT:
        hide_special_tokens(options.exported)
    print(bool(encoder.begin))


if __name__ == "__main__":
    run(main)
