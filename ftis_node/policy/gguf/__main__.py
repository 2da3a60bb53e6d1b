"""The process that turns a GGUF file into a folder: FILE TOKENIZER FOLDER. A refusal is [what, fix] on stdout."""

import json
import os
import sys
from pathlib import Path

from ftis_node.policy.gguf.convert import convert
from ftis_node.policy.gguf.header import UnusableFile


def main() -> None:
    """Turn the file into the folder, which exists and is empty; exit code 2: it was refused. `folder._make` starts it.

    An empty TOKENIZER means the file's own. After a refusal the caller removes the folder.
    """
    file, tokenizer, folder = sys.argv[1:]
    os.umask(0o022)
    try:
        convert(Path(file), Path(tokenizer) if tokenizer else None, Path(folder))
    except UnusableFile as error:
        fix = "Take the model's own folder from its hub, or a file made by llama.cpp's converter."
        if "tokenizer" in str(error):
            fix = f"Name a folder that holds the model's tokenizer: --model {file},tokenizer=FOLDER."
        sys.stdout.write(json.dumps([f"{file} cannot be turned into a folder: {error}.", fix]) + "\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
