"""Decode the bytes of an image file to RGB, or raise an `ImageError` that says why not.

Data sets from the web have all kinds of surprises: CMYK and 16-bit files, GIFs,
text named .jpg, files that end too early, and files of a few bytes that unpack to
gigabytes. We convert whatever has a defined meaning as RGB, and refuse everything else
before we allocate memory for it.

Source: Pillow, Concepts (modes) and the reference of Image.open and Image.draft,
https://pillow.readthedocs.io/en/stable/.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
"""Formats we decode. Pillow knows more, but some of them start other programs."""

MAX_PIXELS = 80_000_000
"""Limit for one image: 240 MB as RGB. ImageNet's largest has 2 % of that."""

_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_BACKGROUND = "white"  # behind what is transparent
_WIDE = ("I;16", "I;16L", "I;16B", "I")
_TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")


class ImageError(ValueError):
    """A file isn't a usable image; `kind` is one of KINDS."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, str]]:
        return type(self), (self.kind, str(self))


KINDS = {
    "unreadable": "the file cannot be opened or read",
    "link loop": "symbolic links lead in a circle",
    "empty file": "the file has no bytes",
    "not an image": "the bytes are none of the known formats",
    "cut short": "the file ends before its image does",
    "corrupt": "the bytes break the rules of their format",
    "too large": f"the image has more than {MAX_PIXELS:,} pixels",
    "unsupported": "the pixels have no defined meaning as RGB",
}


def open_image(data: bytes) -> Image:
    """Open an image to get its size and mode, without decoding pixels yet.

    Raises:
        ImageError: it's empty, too large, or in an unknown format.
    """
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise ImageError("empty file", "the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our own limit is below Pillow's
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        if data.startswith(_MAGIC):
            raise ImageError("corrupt", "its header is damaged or cut short") from None
        raise ImageError("not an image", f"it begins with {_start(data)}") from None
    except Image.DecompressionBombError:
        raise ImageError("too large", "its header promises too many pixels") from None
    except Exception as error:  # a plug-in of Pillow may raise anything
        raise ImageError("corrupt", _reason(error)) from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ImageError("too large", f"{width:,} × {height:,} pixels")
    return image


def to_rgb(image: Image) -> Image:
    """Decode an image, or an animation's first frame, to mode RGB of the same size.

    Pillow converts gray, CMYK and palettes. Of 16 bits, we keep the upper eight, and
    put transparent pixels on white.

    Raises:
        ImageError: the file is truncated or corrupt, or its mode has no RGB meaning.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged EXIF, and such
            image.load()
            return _converted(image)
    except ImageError:
        raise
    except MemoryError:
        raise ImageError("too large", "there is not enough memory for it") from None
    except Exception as error:
        why = _reason(error)
        is_short = "truncated" in why or "not enough" in why or "Truncated" in why
        raise ImageError("cut short" if is_short else "corrupt", why) from error


def decode(data: bytes) -> Image:
    """Decode the bytes of an image file to mode RGB.

    Raises:
        ImageError: we can't use it.
    """
    return to_rgb(open_image(data))


def _converted(image: Image) -> Image:
    if image.mode == "RGB":
        return image
    if image.mode in _WIDE:
        return _upper_bits(image).convert("RGB")
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        return _on_background(image.convert("RGBA"))
    if image.mode in ("1", "L", "P", "CMYK", "YCbCr", "HSV", "RGBX"):
        return image.convert("RGB")
    raise ImageError("unsupported", f"pixels of the mode {image.mode}")


def _upper_bits(image: Image) -> Image:
    import numpy as np
    from PIL import Image

    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() >= 1 << 16:
        raise ImageError("unsupported", "pixels of more than 16 bits")
    return Image.fromarray((values >> 8).astype(np.uint8))


def _on_background(image: Image) -> Image:
    from PIL import Image

    below = Image.new("RGBA", image.size, _BACKGROUND)
    return Image.alpha_composite(below, image).convert("RGB")


def _start(data: bytes) -> str:
    start = data[:8]
    if start.isascii() and start.decode("ascii").isprintable():
        return f"the text {start.decode('ascii')!r}"
    return start.hex(" ")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
