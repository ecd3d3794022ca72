"""What this machine or a model's folder can't do is told before the model loads, which may take minutes."""

from __future__ import annotations

from replayssm.errors import InputError, one_line
from replayssm.loading.folder import find_model


def check_backend(backend: str, device: str) -> None:
    """Refuse a backend that doesn't run on the device.

    Args:
        backend: as for :mod:`replayssm.ops`.
        device: auto, cpu or cuda.
    """
    from replayssm import ops

    try:
        ops.resolve_backend(backend, None if device == "auto" else device)
    except ValueError as error:
        raise InputError(one_line(error)) from error


def check_drafter(model: str, speculate: str | None) -> None:
    """Refuse drafts by an MTP head that the model's folder doesn't have.

    Args:
        model: a model that was checked.
        speculate: how drafts are made.
    """
    if speculate != "mtp":
        return
    from replayssm.loading import load_config, quiet_libraries
    from replayssm.speculate.mtp_head import check_folder

    folder = find_model(model)
    with quiet_libraries():
        config = load_config(folder).get_text_config(decoder=True)
    try:
        check_folder(config.model_type, folder)
    except ValueError as error:
        raise InputError(f"speculation with mtp: {one_line(error)}") from error
