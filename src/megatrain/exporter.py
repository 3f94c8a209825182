"""`megatrain export`: a checkpoint, or any model, as a plain model directory of another dtype."""

import json
from pathlib import Path

from megatrain.checkpoint import masters_of, save_model, verify
from megatrain.checkpoint.export import SAVE_DTYPES
from megatrain.checkpoint.manifest import MANIFEST
from megatrain.data import load_tokenizer
from megatrain.errors import UserError
from megatrain.models.hub import find_model, upload_model
from megatrain.models.load import load_blocks
from megatrain.models.selection import Selection
from megatrain.preflight import check_model


def export_model(
    source: Path,
    target: Path,
    *,
    dtype: str = "auto",
    max_shard_bytes: int = 5 * 10**9,
    push_to_hub: str | None = None,
    private: bool = False,
) -> str:
    """Write `target` from the masters in `source`, block by block.

    Args:
        source: a checkpoint, which is verified, or a model directory.
        target: a directory that does not exist yet.
        dtype: bfloat16, float16, float32, or auto: that of the source's config.
        max_shard_bytes: size limit of a weights file.
        push_to_hub: id of a repository to upload it to.
        private: whether that is private, if it is new.

    Returns:
        The dtype that was written.

    Raises:
        UserError: if the source is damaged or no model, or the target exists.
    """
    check_model(str(source))
    if target.exists():
        raise UserError(
            asked=f"export to {target}", found="something there", change="choose a new directory"
        )
    if (source / MANIFEST).exists():
        verify(source)
    files = find_model(str(source))
    config = json.loads((files.directory / "config.json").read_text(encoding="utf-8"))
    stored = config.get("dtype") or config.get("torch_dtype")
    compute_dtype = "bfloat16" if stored == "bfloat16" else "float32"
    if dtype == "auto":
        dtype = stored if stored in SAVE_DTYPES else "float32"
    blocks = load_blocks(files, compute_dtype=compute_dtype, selection=Selection(evaluation=True))
    tokenizer = load_tokenizer(files.directory)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_model(
            blocks.model,
            masters_of(blocks.model, files.directory),
            target,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            tokenizer=tokenizer,
        )
    except OSError as error:
        raise UserError(
            asked=f"export to {target}",
            found=f"no way to write there ({error.strerror or error})",
            change="make room, or choose another directory",
        ) from error
    if push_to_hub is not None:
        upload_model(target, push_to_hub, private=private)
    return dtype
