"""The settings in two tiers, as a file: those that owners change, with when and why, and those for experts."""

from collections.abc import Iterator, Mapping

from ftis_node.config.settings import Settings, group_of
from ftis_node.text import escaped, in_toml

OWNERS: Mapping[str, str] = {
    "model": "always; the first that your card can train",
    "lora": "to train all weights, or to save memory",
    "device": "to choose a card, or to use several",
    "vram_gb": "if other programs need the card too",
    "engine": "if you run vLLM",
    "objective": "`gated` among strangers, other models or tokenizers",
    "learning_rate": "a third of it if pass@1 falls, thrice if it stays where it is",
    "batch_groups": "to make steps shorter, or less noisy",
    "own_share": "`0` for a machine that is too slow to sample",
    "wait": "longer if your peers are slower than you",
    "defences": "all four where most peers may be hostile",
    "port": "to open it in a router or firewall",
    "announce": "if the public address is the router's",
    "lan": "to meet machines in the same room",
    "upload_mbit": "if the line is slow, or does nothing else",
    "hours": "if power, noise or heat matter by day",
    "idle_only": "on a machine that is also used for other things",
    "nice": "if the machine feels slow meanwhile",
    "disk_gb": "if the disk is small or shared",
    "self_report": "`never` to report nothing",
    "track": "if you watch curves there anyway",
    "http_port": "for Prometheus, or a proxy",
}
"""The settings that owners change, and when or why; all others are for experts."""
EXPERTS = "Experts"


def in_tiers() -> Iterator[tuple[str, list[str]]]:
    """First the settings that owners change, without a title; then those for experts, by the title of their group."""
    yield "", [name for name in Settings.model_fields if name in OWNERS]
    experts: dict[str, list[str]] = {}
    for name in Settings.model_fields:
        if name not in OWNERS:
            experts.setdefault(f"{EXPERTS}: {group_of(name)}", []).append(name)
    yield from experts.items()


def as_toml(settings: Settings, origins: Mapping[str, str] | None) -> str:
    """Return all settings in tiers as a settings file, unset ones as comments; beside them origins, or when."""
    values = settings.model_dump(mode="json")
    lines = []
    for title, names in in_tiers():
        if title:
            lines += ["", f"# {title}"]
        for name in names:
            line = f"# {name} is unset"
            if values[name] is not None:
                line = f"{name} = {in_toml(values[name])}"
            beside = OWNERS.get(name, "")
            if origins is not None:
                beside = escaped(origins[name])
            if beside:
                line = f"{line:<50} # {beside}"
            lines.append(line)
    return "\n".join(lines) + "\n"
