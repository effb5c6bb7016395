"""A profile with the times of a further kind of device."""

from __future__ import annotations

from .layer_profile import ModelProfile

__all__ = ["with_kind"]


def with_kind(profile: ModelProfile, kind: str, measured: ModelProfile) -> ModelProfile:
    """``profile`` with the times of ``measured`` as those of another kind of device. Sizes of layers stay as they are.

    Args:
        profile: of the model.
        kind: name of the kind in the cluster file.
        measured: the same model, measured on one device of this kind.

    Raises:
        ValueError: the profile has the kind already; the other one is of another model or precision; or it has no times
            of a micro-batch between those of the profile.
    """
    if kind in profile.devices:
        raise ValueError(f"the profile of {profile.name} has times of {kind} already")
    for what, here, there in (
        ("layers", profile.layers, measured.layers),
        ("blocks", profile.blocks, measured.blocks),
        ("precision", profile.precision, measured.precision),
    ):
        if here != there:
            raise ValueError(
                f"what was measured on {kind} is another model than that of the profile: {what} {there} instead of "
                f"{here}; measure the model that is trained, in the precision of the profile"
            )
    if len(measured.devices) != 1:
        raise ValueError(f"times of {', '.join(measured.devices)} were measured for {kind}; measure one device only")
    degrees = {sizes.tensor_parallel for sizes in profile.sizes}
    times = [each.model_copy(update={"device": kind}) for each in measured.times if each.tensor_parallel in degrees]
    sizes = sorted({each.micro_batch for each in profile.times})
    if not any(sizes[0] <= each.micro_batch <= sizes[-1] for each in times):
        raise ValueError(
            f"micro-batches of {', '.join(str(each.micro_batch) for each in measured.times)} were measured on {kind}, "
            f"but the profile has {', '.join(map(str, sizes))}; measure the same ones"
        )
    context = dict.fromkeys([kind], max(measured.context_bytes.values())) if measured.context_bytes else {}
    return profile.model_copy(
        # Ranks are those that measured the profile; with another device among them they mean nothing.
        update={
            "times": (*profile.times, *times),
            "context_bytes": profile.context_bytes | context,
            "rank_devices": (),
        }
    )
