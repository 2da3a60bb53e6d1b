"""Checks beyond a single setting's type: names of objectives and their parts, and settings that contradict others."""

import ipaddress
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ftis_node.errors import UsageError, did_you_mean, raise_all
from ftis_node.methods import METHODS, NAMES
from ftis_node.methods.choices import PART_LIMITS
from ftis_node.methods.removed import refusals

# Beyond it numbers have no room in messages (64 bits) or in float32, and mean nothing: seeds have a bound of their own.
_LARGEST = 10**15

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")
_MB_PER_GB = 1024
Origins = Mapping[str, str]  # where each came from
Values = Mapping[str, Any]  # settled settings, by name
# Pattern of a host; the last label begins with a letter, or a mistyped address would be a name.
_NAME = re.compile(r"([a-z0-9_]([a-z0-9_-]*[a-z0-9])?\.)*[a-z]([a-z0-9_-]*[a-z0-9])?", re.IGNORECASE)


def check(values: Values, origins: Origins) -> None:
    """Check settled settings; `origins` says of each where it came from.

    Raises:
        UsageError: what is wrong, all of it.
    """
    raise_all(_numbers(values, origins))  # first: what follows computes with them
    raise_all(error for part in (_names, _machine, _network) for error in part(values, origins))


def by_a_person(origin: str) -> bool:
    """Whether a value of that origin was set by somebody, rather than by defaults and the task."""
    return not origin.startswith(("default", "task "))


def _numbers(values: Values, origins: Origins) -> Iterator[UsageError]:
    for key, value in values.items():
        bounded = isinstance(value, (int, float)) and key != "seed" and key not in PART_LIMITS
        if bounded and _LARGEST < abs(value) < math.inf:
            yield UsageError(f"The {key} cannot be {value} ({origins[key]}): it is too large.", "Give a smaller one.")


def _names(values: Values, origins: Origins) -> Iterator[UsageError]:
    for key, known in NAMES.items():
        if values.get(key) is not None and values[key] not in known:
            yield next(
                refusals({key: values[key]}, origins[key]),
                UsageError(
                    f"There is no {key} {values[key]!r} ({origins[key]}).",
                    f"{did_you_mean(values[key], known)}Use one of: {', '.join(known)}.",
                ),
            )
    for key, (limits, holds) in PART_LIMITS.items():
        value = values.get(key)
        if value not in (None, "none") and not (math.isfinite(value) and holds(value)):
            yield UsageError(f"The {key} cannot be {value} ({origins[key]}).", f"Give a number {limits}.")
    parts = METHODS[values["objective"]]() if values["objective"] in METHODS else {}
    named = f"{values['objective']} ({origins['objective']})"
    nothing = f"own_share = 0 ({origins['own_share']}) generates nothing, and {named}"
    listens = values["own_share"] == 0
    if "own_only" in parts and listens:
        yield UsageError(
            f"{nothing} learns from own samples only.",
            "Leave out own_share, or use an objective that learns from others.",
        )
    if "gate" in parts and values["gate"] != "none" and listens:
        yield UsageError(
            f"{nothing} measures others' samples by own successes: it would learn nothing.",
            "Leave out own_share, or use an objective without a gate, as ftis.",
        )


def _devices(devices: Sequence[str], values: Values, origins: Origins) -> Iterator[UsageError]:
    unknown = [device for device in devices if not _DEVICE.fullmatch(device)]
    for device in unknown:
        yield UsageError(
            f"{device!r} is no device ({origins['device']}).",
            f"{did_you_mean(device, ('cpu', 'cuda', 'auto'))}Use cpu, cuda, cuda:0 or auto.",
        )
    if values["sharded"]:
        against = {
            "one device": len(devices) == 1,
            f"LoRA layers ({origins['lora']})": values["lora"],
            f"quantisation=nf4 ({origins['quantisation']})": values["quantisation"] == "nf4",
            f"optimiser=adamw8bit ({origins['optimiser']})": values["optimiser"] == "adamw8bit",
        }
        for other in (other for other, there in against.items() if there):
            yield UsageError(
                f"sharded ({origins['sharded']}) does not go with {other}.",
                "Leave out sharded, or use --full on several devices with adamw.",
            )
    if len(devices) == 1 or unknown:
        return
    if values["engine"] == "vllm":
        yield UsageError(
            f"engine=vllm ({origins['engine']}) goes with one device, and there are {','.join(devices)}.",
            "Let the node train on one of them, and vLLM sample on the other.",
        )
    kinds = {device.partition(":")[0] for device in devices}
    gpus = [device for device in devices if device != "cpu"]
    if len(kinds) > 1 or "auto" in kinds or "cuda" in gpus or len(set(gpus)) < len(gpus):
        yield UsageError(
            f"{','.join(devices)} ({origins['device']}) cannot train together.",
            "Name each GPU once, such as cuda:0,cuda:1, or a CPU several times: cpu,cpu.",
        )


def _machine(values: Values, origins: Origins) -> Iterator[UsageError]:
    device = values["device"]
    disk = values["disk_gb"]
    quota = values["packet_quota_mb"]
    yield from _devices(device.split(","), values, origins)
    if values["vram_gb"] is not None and values["vram_share"] is not None:
        yield UsageError(
            f"vram_gb ({origins['vram_gb']}) and vram_share ({origins['vram_share']}) both limit the memory.",
            "Keep one of them.",
        )
    if values["lora"] and not values["lora_targets"]:
        yield UsageError(
            f"LoRA layers ({origins['lora']}) have nowhere to go: lora_targets is empty ({origins['lora_targets']}).",
            "Name modules of the model, such as q_proj,v_proj, or train it in full.",
        )
    if values["quantisation"] == "nf4" and values["lora"] is False:
        yield UsageError(
            f"NF4 ({origins['quantisation']}) is for frozen weights, and full training ({origins['lora']}) has none.",
            "Leave out quantisation, or train LoRA layers.",
        )
    # A quota that nobody chose is not held against somebody's limit of the disk.
    if disk is not None and quota > disk * _MB_PER_GB and by_a_person(origins["packet_quota_mb"]):
        quota_of = origins["packet_quota_mb"]
        disk_of = origins["disk_gb"]
        yield UsageError(
            f"Packets alone may take {quota} MB ({quota_of}), but the home no more than {disk:g} GB ({disk_of}).",
            "Lower packet_quota_mb, or raise disk_gb.",
        )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _network(values: Values, origins: Origins) -> Iterator[UsageError]:
    if not _is_address(values["host"]):
        yield UsageError(
            f"The host {values['host']!r} is no IP address ({origins['host']}).",
            "Write 127.0.0.1 for this machine alone, 0.0.0.0 for all its addresses, or one of them.",
        )
    if not (_is_address(values["http_host"]) or _NAME.fullmatch(values["http_host"])):
        yield UsageError(
            f"The http_host {values['http_host']!r} is neither an IP address nor a name ({origins['http_host']}).",
            "Write 127.0.0.1 for this machine alone, 0.0.0.0 for all its addresses, one of them, or a name of it.",
        )
    port = values["port"]
    if port != 0 and port == values["http_port"] and values["page"] and values["listen"]:
        yield UsageError(
            f"Peers ({origins['port']}) and the page ({origins['http_port']}) cannot both have the port {port}.",
            "Give port or http_port another one, or 0 for any.",
        )
    if values["announce"] and not values["listen"]:
        tells = origins["announce"]
        hears = origins["listen"]
        yield UsageError(
            f"announce ({tells}) tells others where to dial, but listen is false ({hears}).", "Leave out one of them."
        )
