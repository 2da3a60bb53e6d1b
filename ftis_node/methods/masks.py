"""Corrections for samplers that are not quite the learner: importance weights with masks.

    icepop   ρₜ where 0.5 ≤ ρₜ ≤ 5, else nothing
    mis      Πₜ ρₜ of the sample, nothing beyond 3
    geo-rs   min(ρₜ, C), if the geometric mean of the sample's ρ lies in [0.5, 2]

Trained on: own samples and others' alike. No signal: a group of equal rewards; a token or sample outside the bounds.
"""

from ftis_node.methods.choices import Parts


def icepop() -> Parts:
    """ρₜ where 0.5 ≤ ρₜ ≤ 5, else no gradient (`mask=token`).

    Of others: what the mask leaves. Source: Ling.
    """
    return {"truncation": 5.0, "threshold": None, "mask": "token", "mask_low": 0.5, "mask_high": 5.0}


def mis() -> Parts:
    """Πₜ ρₜ of the sample; nothing beyond 3 (`importance=sequence`, `mask=sequence`).

    Of others: what the mask leaves. Source: TRL's `sequence_mask`.
    """
    return {"importance": "sequence", "threshold": None, "mask": "sequence"}


def geo_rs() -> Parts:
    """`tis`; a sample counts if its geometric mean of ρ lies in [0.5, 2] (`mask=geometric`).

    Of others: what the mask leaves. Source: verl.
    """
    return {"threshold": None, "mask": "geometric", "mask_low": 0.5, "mask_high": 2.0}
