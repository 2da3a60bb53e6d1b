"""Model names: short aliases, built-in models, hub ids and local folders."""

from pathlib import Path

from ftis_node.errors import UsageError, did_you_mean

BUILT_IN_DIR = Path(__file__).resolve().parent.parent / "models"

_SIZES = ("0.5B", "1.5B", "3B", "7B")
ALIASES: dict[str, str] = {
    f"qwen2.5-{infix}{size.lower()}{suffix}": f"Qwen/Qwen2.5-{infix_hub}{size}{suffix_hub}"
    for infix, infix_hub in (("", ""), ("coder-", "Coder-"))
    for size in _SIZES
    for suffix, suffix_hub in (("", ""), ("-instruct", "-Instruct"))
}


def built_in() -> tuple[str, ...]:
    """Names of the models that come with the package."""
    return tuple(sorted(path.parent.name for path in BUILT_IN_DIR.glob("*/config.json")))


def resolve(name: str) -> str:
    """The folder or hub id that transformers should load for `name`.

    Raises:
        UsageError: `name` is neither a folder, a built-in model, an alias, nor of the form owner/model.
    """
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            what = f"The folder {name} holds no model (config.json is missing)."
            raise UsageError(what, "Name a folder in the format of transformers' save_pretrained.")
        return str(Path(name).resolve())
    if name in built_in():
        return str(BUILT_IN_DIR / name)
    if name.lower() in ALIASES:
        return ALIASES[name.lower()]
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/"):
        return name
    known = [*ALIASES, *built_in()]
    raise UsageError(
        f"There is no model {name!r}: no such folder, alias or built-in model.",
        f"{did_you_mean(Path(name).name.lower(), known)}Give a local folder, a hub id such as Qwen/Qwen2.5-3B, or one "
        f"of: {', '.join(built_in())}, "
        "qwen2.5-0.5b, -1.5b, -3b, -7b, qwen2.5-coder-…, each also with -instruct.",
    )


def source_of(name: str) -> str:
    """The result of `resolve`; the name itself where nothing here has it, as a folder that is gone."""
    try:
        return resolve(name)
    except UsageError:
        return name


def same_model(one: str, other: str) -> bool:
    """Whether two names mean one model: ``m``, ``./m`` and the whole path; a short name and its hub id."""
    return one == other or source_of(one) == source_of(other)


def lasting(name: str) -> str:
    """The name to write down, which means the same model wherever a command is given: of a folder the whole path."""
    source = source_of(name)
    return source if Path(source).is_dir() and Path(source).parent != BUILT_IN_DIR else name


def public_name(name: str) -> str:
    """The model's hub id, or the last part of a folder's path: paths of this machine are nobody else's business.

    Raises:
        UsageError: as `resolve`.
    """
    source = Path(resolve(name))
    public = name if source.parent == BUILT_IN_DIR else source.name if source.is_dir() else str(source)
    return public.encode(errors="replace").decode()  # a folder's name may be no text
