"""Model names: short aliases, built-in models, hub ids, local folders and GGUF files."""

import re
from pathlib import Path

from ftis_node.errors import UsageError, did_you_mean
from ftis_node.policy.kinds import refuse_folder

BUILT_IN_DIR = Path(__file__).resolve().parent.parent / "models"

_TOKENIZER = ",tokenizer="
_SIZES = ("0.5B", "1.5B", "3B", "7B")
ALIASES: dict[str, str] = {
    f"qwen2.5-{infix}{size.lower()}{suffix}": f"Qwen/Qwen2.5-{infix_hub}{size}{suffix_hub}"
    for infix, infix_hub in (("", ""), ("coder-", "Coder-"))
    for size in _SIZES
    for suffix, suffix_hub in (("", ""), ("-instruct", "-Instruct"))
}


_OLLAMA = re.compile(r"[\w.-]+:[\w.-]+")


def _digits(name: str) -> str:
    """The digits of a name in their order: its generation and size."""
    return "".join(filter(str.isdigit, name))


def built_in() -> tuple[str, ...]:
    """Names of the models that come with the package, sorted; read from the disk at each call."""
    return tuple(sorted(path.parent.name for path in BUILT_IN_DIR.glob("*/config.json")))


def file_of(name: str) -> tuple[Path, Path | None] | None:
    """The GGUF file that is named, and the folder whose tokenizer it is to have: FILE.gguf,tokenizer=FOLDER.

    Both are whole paths. Nothing is read: any file counts, and the folder need not be there. The folder is None where
    none is named. The result is None if there is no such file, or a built-in model or an alias has its name.
    """
    file, _, folder = name.partition(_TOKENIZER)
    if not Path(file).is_file() or file in built_in() or file.lower() in ALIASES:
        return None
    tokenizer = None
    if folder:
        tokenizer = Path(folder).expanduser().resolve()
    return Path(file).resolve(), tokenizer


def resolve(name: str) -> str:
    """The folder, as a whole path, or the hub id that transformers should load for `name`.

    The hub is not asked. A GGUF file becomes a folder in the user's cache: this takes minutes the first time, and as
    much of the disk as its weights in bfloat16.

    Raises:
        UsageError: a folder is of another kind (see `kinds`), or `name` is neither a folder, a GGUF file, a built-in
            model, an alias, nor of the form owner/model.
        UserError: a GGUF file cannot be turned into a folder (see `gguf.folder`).
    """
    found = file_of(name)
    if found is not None:
        from ftis_node.policy.gguf.folder import folder_of

        return str(folder_of(*found))
    path = Path(name)
    if path.is_dir():
        refuse_folder(path, name)
        return str(path.resolve())
    lowered = name.lower()
    if _TOKENIZER in name or lowered.endswith(".gguf"):
        raise UsageError(
            f"There is no file {name.partition(_TOKENIZER)[0]}.",
            "Name a GGUF file that is here; one of a hub is downloaded first.",
        )
    if name in built_in():
        return str(BUILT_IN_DIR / name)
    if lowered in ALIASES:
        return ALIASES[lowered]
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/"):
        return name
    if _OLLAMA.fullmatch(name):
        raise UsageError(
            f"{name} is a name of Ollama's, and no model here.",
            f"`ollama show {name} --modelfile` names its file after FROM: give that with --model.",
        )
    # A misspelt letter is one thing, another size or generation is another model.
    known = [one for one in (*ALIASES, *built_in()) if _digits(one) == _digits(path.name)]
    raise UsageError(
        f"There is no model {name!r}: no such folder, alias or built-in model.",
        f"{did_you_mean(path.name.lower(), known)}Give a local folder, a GGUF file, a hub id such as "
        f"Qwen/Qwen2.5-3B, or one of: {', '.join(built_in())}, "
        "qwen2.5-0.5b, -1.5b, -3b, -7b, qwen2.5-coder-…, each also with -instruct.",
    )


def source_of(name: str) -> str:
    """The result of `resolve`; the name itself where nothing here has it, as a folder that is gone; of a GGUF file its
    whole path, with its tokenizer's folder if one is named. A refused name is no error, and no GGUF file is unpacked.
    """
    found = file_of(name)
    if found is not None:
        file, folder = found
        if folder is None:
            return str(file)
        return f"{file}{_TOKENIZER}{folder}"
    try:
        return resolve(name)
    except UsageError:
        return name


def same_model(one: str, other: str) -> bool:
    """Whether two names mean one model: ``m``, ``./m`` and the whole path; a short name and its hub id.

    Names are compared, not weights: a copy of a folder is another model. A start refuses checkpoints of another model.
    """
    return one == other or source_of(one) == source_of(other)


def lasting(name: str) -> str:
    """The name to write down, as a checkpoint's label has it. It means the same model in whichever directory a command
    is given: of a folder or a GGUF file it is the whole path, for others `name` as it is."""
    source = source_of(name)
    local = file_of(name) is not None or Path(source).is_dir()
    if local and Path(source).parent != BUILT_IN_DIR:
        return source
    return name


def public_name(name: str) -> str:
    """The model's hub id, or the last part of its path here: paths of this machine are nobody else's business.

    Self-reports, metrics and cards of exports show it. It can be written as UTF-8, and has any length.

    Raises:
        UsageError: as `resolve`, also for a folder that is gone. No GGUF file is unpacked.
    """
    found = file_of(name)
    if found is not None:
        return found[0].name.encode(errors="replace").decode()
    source = Path(resolve(name))
    if source.parent == BUILT_IN_DIR:
        public = name
    elif source.is_dir():
        public = source.name
    else:
        public = str(source)
    return public.encode(errors="replace").decode()  # a folder's name may be no text
