"""Image folders with one thing wrong, or unusual: what must be said of them."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES, PER_CLASS = ("cat", "dog"), 3
BAD_EXIF = b"Exif\0\0MM\0*\0\0\0\xff"
Spoil = Callable[[Path], object]
"""Given DIR/train/cat: put something wrong into it, or near it."""


@dataclass(frozen=True)
class Case:
    """`kinds` are those of the problems, `converted` of the conversions, in check."""

    name: str
    spoil: Spoil
    kinds: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    is_refused: bool = False  # train cannot be used at all
    is_fatal: bool = False  # nor can val


def picture(mode: str = "RGB", size: tuple[int, int] = (48, 32)) -> Image.Image:
    """An image that JPEG compresses: a ramp in two directions."""
    width, height = size
    across = np.linspace(0, 255, width)[None, :, None]
    down = np.linspace(0, 255, height)[:, None, None]
    values = np.concatenate(
        [across + 0 * down, 0 * across + down, across / 2 + down / 2], 2
    )
    return Image.fromarray(values.astype(np.uint8)).convert(mode)


def encoded(
    image: Image.Image | None = None, form: str = "JPEG", **more: object
) -> bytes:
    buffer = io.BytesIO()
    (image or picture()).save(buffer, form, **more)
    return buffer.getvalue()


def good_folder(root: Path) -> None:
    for split in ("train", "val"):
        for name in CLASSES:
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(PER_CLASS):
                (folder / f"{number}.jpg").write_bytes(encoded())


def png_header(width: int, height: int, bits: int = 8, kind: int = 2) -> bytes:
    """A PNG that promises width × height pixels and has none."""

    def chunk(name: bytes, body: bytes) -> bytes:
        sum_of = zlib.crc32(name + body)
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", sum_of)

    head = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(b"\0" * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + data + chunk(b"IEND", b"")


def file(name: str, data: Callable[[], bytes]) -> Spoil:
    return lambda folder: (folder / name).write_bytes(data())


def animation() -> bytes:
    frames = [picture("P"), picture("P").rotate(180)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def saved(
    name: str, mode: str = "RGB", size: tuple[int, int] = (48, 32), **more: object
) -> Spoil:
    """An image in the format that the name's suffix says."""
    return lambda folder: picture(mode, size).save(folder / name, **more)


def link(name: str, target: str) -> Spoil:
    return lambda folder: (folder / name).symlink_to(target)


def a_png() -> bytes:
    return encoded(form="PNG")


def bomb() -> bytes:
    """100 million pixels in a small file."""
    return encoded(Image.new("1", (10_000, 10_000)), "PNG")


def half_a_jpeg() -> bytes:
    data = encoded(picture(size=(480, 320)))
    return data[: len(data) // 2]


def with_hole(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + b"\x00" * 40 + data[middle + 40 :]


def sixteen_bits() -> bytes:
    values = np.linspace(0, 65535, 48 * 32).reshape(32, 48).astype(np.uint16)
    return encoded(Image.fromarray(values), "PNG")


def of_type(dtype: str) -> Callable[[], bytes]:
    return lambda: encoded(Image.fromarray(np.full((8, 8), 1 << 20, dtype)), "TIFF")


def sparse(folder: Path) -> None:
    with open(folder / "a.jpg", "wb") as sparse_file:
        sparse_file.truncate(1 << 40)


def loop_of_links(folder: Path) -> None:
    (folder / "a.jpg").symlink_to("b.jpg")
    (folder / "b.jpg").symlink_to("a.jpg")


def no_rights(folder: Path) -> None:
    (folder / "a.jpg").write_bytes(encoded())
    (folder / "a.jpg").chmod(0)


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def moved_away(folder: Path) -> None:
    emptied(folder)
    folder.rmdir()


def no_dog_in_val(folder: Path) -> None:
    moved_away(folder.parents[1] / "val" / "dog")


def deeper(folder: Path) -> None:
    (folder / "new").mkdir()
    (folder / "new" / "a.jpg").write_bytes(encoded())


def new_class_in_val(folder: Path) -> None:
    other = folder.parents[1] / "val" / "owl"
    other.mkdir()
    (other / "0.jpg").write_bytes(encoded())


def train_is_a_file(folder: Path) -> None:
    moved_away(folder)
    moved_away(folder.parent / "dog")
    folder.parent.rmdir()
    folder.parent.write_text("no folder")


def no_classes(folder: Path) -> None:
    for name in CLASSES:
        for path in (folder.parent / name).iterdir():
            path.rename(folder.parent / f"{name}-{path.name}")
        (folder.parent / name).rmdir()


def not_utf8(folder: Path) -> None:
    with open(os.fsencode(folder) + b"/caf\xe9.jpg", "wb") as latin:
        latin.write(b"")


CASES = [
    Case("nothing wrong", lambda folder: None),
    # files that are no images
    Case("zero bytes", file("a.jpg", lambda: b""), ("empty file",)),
    Case("text", file("a.jpg", lambda: b"to do: download"), ("not an image",)),
    Case("html", file("a.jpeg", lambda: b"<html>404</html>"), ("not an image",)),
    Case("zeros", file("a.jpg", lambda: bytes(4096)), ("not an image",)),
    Case("pdf", file("a.jpg", lambda: b"%PDF-1.7\n%"), ("not an image",)),
    Case(
        "postscript, which Pillow would run",
        file("a.jpg", lambda: encoded(form="EPS")),
        ("not an image",),
    ),
    Case(
        "a format that is not decoded",
        file("a.jpg", lambda: encoded(form="ICO")),
        ("not an image",),
    ),
    # images that are damaged
    Case("half a JPEG", file("a.jpg", half_a_jpeg), ("cut short",)),
    Case("40 bytes short", file("a.jpg", lambda: encoded()[:-40]), ("cut short",)),
    Case("a JPEG's first bytes", file("a.jpg", lambda: encoded()[:20]), ("corrupt",)),
    Case("half a PNG", file("a.png", lambda: a_png()[:90]), ("cut short",)),
    Case("a PNG with a hole", file("a.png", lambda: with_hole(a_png())), ("corrupt",)),
    Case("half a GIF", file("a.gif", lambda: animation()[:900]), ("cut short",)),
    Case("a PNG of no width", file("a.png", lambda: png_header(0, 9)), ("corrupt",)),
    Case("no pixels", file("a.png", lambda: png_header(99, 99)), ("cut short",)),
    Case("damaged EXIF, the pixels are there", saved("a.jpg", exif=BAD_EXIF)),
    # too large
    Case("a bomb", file("a.png", bomb), ("too large",)),
    Case(
        "a promise", file("a.png", lambda: png_header(90_000, 90_000)), ("too large",)
    ),
    Case(
        "2**60 pixels", file("a.png", lambda: png_header(2**30, 2**30)), ("too large",)
    ),
    Case("a file of a terabyte", sparse, ("too large",)),
    Case("one pixel by 3,000", saved("a.png", "RGB", (3000, 1))),
    Case("one pixel", saved("a.png", "RGB", (1, 1))),
    # other pixels than RGB
    Case("CMYK", saved("a.jpg", "CMYK"), (), ("CMYK",)),
    Case("gray", saved("a.jpg", "L"), (), ("gray",)),
    Case("16 bits", file("a.png", sixteen_bits), (), ("16 bits",)),
    Case("float", file("a.tif", of_type("float32")), ("unsupported",)),
    Case("32 bits", file("a.tif", of_type("int32")), ("unsupported",)),
    Case("one bit", saved("a.png", "1"), (), ("black and white",)),
    Case("RGBA", saved("a.png", "RGBA"), (), ("transparent",)),
    Case("LA", saved("a.png", "LA"), (), ("transparent",)),
    Case(
        "a palette with transparency",
        saved("a.png", "P", transparency=3),
        (),
        ("palette", "transparent"),
    ),
    Case("animated", file("a.gif", animation), (), ("more than one frame", "palette")),
    Case("WebP", saved("a.webp")),
    Case("a PNG named .jpg", file("a.jpg", a_png)),
    # names and folders
    Case("UPPER CASE", file("N01.JPEG", encoded)),
    Case("letters and emoji", file("猫 é 🐈.jpg", encoded)),
    Case("a newline in a name", file("a\nb.jpg", lambda: b""), ("empty file",)),
    Case("a name that is not UTF-8", not_utf8, ("empty file",)),
    Case("another suffix", file("notes.txt", lambda: b"x"), ("unknown suffix",)),
    Case("a desktop's hidden files", file("._0.jpg", lambda: b"x")),
    Case("a deeper folder", deeper),
    Case("a folder named like an image", lambda folder: (folder / "a.jpg").mkdir()),
    Case("an empty class", emptied, ("empty class",)),
    Case("a class that val lacks", no_dog_in_val, ("missing class",)),
    Case("a class that train lacks", new_class_in_val, ("unknown class",)),
    Case("links in a circle", loop_of_links, ("link loop", "link loop")),
    Case("a link to nothing", link("a.jpg", "gone"), ("unreadable",)),
    Case("a folder within itself", link("a", "."), ("link loop",)),
    Case("a pipe", lambda f: os.mkfifo(f / "a.jpg"), ("unreadable",)),
    Case("a device without end", link("a.jpg", "/dev/zero"), ("unreadable",)),
    Case("no rights", no_rights, ("unreadable",)),
    Case("no rights to a class", lambda f: f.chmod(0), ("unreadable", "empty class")),
    # nothing to use
    Case("train is a file", train_is_a_file, is_refused=True),
    Case("no classes", no_classes, is_refused=True, is_fatal=True),
]
