"""Finds the tensors of the contract in a source checkpoint: each exactly once, with the right shape and dtype."""

from mosaic.format import e4m3, layout
from mosaic.format.errors import InputError
from mosaic.format.source import Checkpoint
from mosaic.format.tensors import Piece, TensorSpec, scale_name

FLOATS = ("BF16", "F16", "F32")

#: Where a tensor comes from: its piece, and for an FP8 source the piece with its scales.
Source = tuple[Piece, Piece | None]


def match(checkpoint: Checkpoint, contract: list[TensorSpec]) -> dict[str, Source]:
    """The source piece and scale piece of every tensor; nothing missing, double, mis-shaped or left over."""
    names = checkpoint.tensors
    result: dict[str, Source] = {}
    missing: list[str] = []
    used: set[str] = set()
    for tensor in contract:
        present = [piece for piece in tensor.pieces if piece.name in names]
        if not present:
            missing.append(" or ".join(piece.name for piece in tensor.pieces))
            continue
        if len(present) > 1:
            raise InputError(
                "a tensor stands in the checkpoint twice",
                file=checkpoint.folder,
                tensor=tensor.name,
                found=" and ".join(piece.name for piece in present),
                expected="one of them",
                remedy="download the checkpoint again into an empty directory",
            )
        piece = present[0]
        scale = _scale_piece(checkpoint, piece)
        _check_shape(checkpoint, piece)
        used.add(piece.name)
        if scale:
            _check_shape(checkpoint, scale)
            used.add(scale.name)
        result[tensor.key] = (piece, scale)
    if missing:
        raise _names_differ(checkpoint, "the checkpoint lacks tensors", missing, "finish the download")
    if unknown := [name for name in names if name not in used]:
        remedy = "Mosaic converts only what it knows how to place; check model_type and the source of these tensors"
        raise _names_differ(checkpoint, "the checkpoint holds tensors no rule covers", unknown, remedy)
    return result


def _scale_piece(checkpoint: Checkpoint, piece: Piece) -> Piece | None:
    """The scales of an FP8 piece; None if it is not FP8."""
    info = checkpoint.tensors[piece.name]
    if info.dtype in FLOATS:
        return None
    name = scale_name(piece.name)
    scale = checkpoint.tensors.get(name)
    if info.dtype != "F8_E4M3":
        found = info.dtype
        if info.dtype == "U8":  # E4M3 codes, were both of these there (`source`)
            found += " with scales, but no block FP8 in quantization_config" if scale else f", no {name}"
        raise InputError(
            "a tensor has a dtype Mosaic does not convert",
            file=info.file,
            tensor=piece.name,
            found=found,
            expected="BF16, F16, F32, or F8_E4M3 with scales",
            remedy="use the BF16 checkpoint or the official FP8 release",
        )
    if scale is None or scale.dtype not in FLOATS:
        raise _no_scales(checkpoint, piece.name)
    if len(piece.shape) < 2:
        raise _mis_shaped(checkpoint, piece.name, "an FP8 matrix")
    shape = (*piece.shape[:-2], *e4m3.grid(piece.shape[-2:]))
    rows = piece.rows
    if rows and any(row % e4m3.BLOCK for row in rows):
        raise _mis_shaped(checkpoint, piece.name, f"fused FP8 parts of a multiple of {e4m3.BLOCK} rows")
    return Piece(name, shape, piece.index, (rows[0] // e4m3.BLOCK, rows[1] // e4m3.BLOCK) if rows else None)


def _no_scales(checkpoint: Checkpoint, weight: str) -> InputError:
    name, other = scale_name(weight), f"{weight}_scale"
    scale = checkpoint.tensors.get(name)
    found = f"{name} in {scale.dtype}" if scale else f"no {name}"
    remedy = "download the checkpoint again; a weight without its scales means nothing"
    if not scale and other in checkpoint.tensors:
        found += f", but {other}"
        remedy = (
            "use the official FP8 release or the BF16 checkpoint: under that name some tools store the multiplier and "
            "others its reciprocal, and Mosaic does not guess"
        )
    return InputError(
        "an FP8 weight has no usable scales",
        file=checkpoint.tensors[weight].file,
        tensor=weight,
        found=found,
        expected=f"{name} in BF16, F16 or F32",
        remedy=remedy,
    )


def _check_shape(checkpoint: Checkpoint, piece: Piece) -> None:
    if checkpoint.tensors[piece.name].shape != piece.shape:
        raise _mis_shaped(checkpoint, piece.name, f"{list(piece.shape)} by {layout.CONFIG_FILE}")


def _mis_shaped(checkpoint: Checkpoint, name: str, expected: str) -> InputError:
    info = checkpoint.tensors[name]
    return InputError(
        "a tensor has the wrong shape",
        file=info.file,
        tensor=name,
        found=list(info.shape),
        expected=expected,
        remedy="config.json and weights must belong together: download both again",
    )


def _names_differ(checkpoint: Checkpoint, problem: str, names: list[str], remedy: str) -> InputError:
    names = list(dict.fromkeys(names))
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    place = checkpoint.tensors[names[0]].file if names[0] in checkpoint.tensors else checkpoint.folder
    return InputError(
        problem,
        file=place,
        tensor=shown,
        found=f"{len(names)} such tensors",
        expected=f"exactly the tensors that {layout.CONFIG_FILE} calls for",
        remedy=remedy,
    )
