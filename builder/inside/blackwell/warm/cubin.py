"""Read what a compiled kernel needs out of its cubin: registers a thread, local memory, and code size. Standard library only.

The records of `.nv.info` are what NVIDIA's `cuobjdump -elf` prints: a byte for the format, a byte for the attribute, then a half word,
or a size and that many bytes.
"""

import struct
from dataclasses import dataclass

FRAME_SIZE, REGISTERS = 0x11, 0x2F  # EIATTR_FRAME_SIZE, EIATTR_REGCOUNT: (symbol, value) pairs
SIZED = 4
WORD = 4  # bytes of a spilled register


class CubinError(ValueError):
    """The bytes are not a cubin that this module can read; the text says what is wrong."""


@dataclass(frozen=True, kw_only=True)
class CubinFacts:
    """What one kernel of a cubin needs."""

    registers: int  # a thread
    local_bytes: int  # a thread: the stack, which is where spilled registers go
    code_bytes: int

    @property
    def spills(self) -> int:
        """Spilled registers as Triton counts them: words of local memory."""
        return self.local_bytes // WORD


def read(data: bytes, kernel: str) -> CubinFacts:
    """The facts of the named kernel. Raises CubinError for anything that isn't a whole cubin with that kernel."""
    try:
        return _read(data, kernel)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise CubinError(f"not a readable cubin of kernel {kernel}: {error}") from error


def _read(data: bytes, kernel: str) -> CubinFacts:
    if data[:4] != b"\x7fELF" or data[4] != 2:
        raise CubinError("it does not start like a 64-bit ELF file")
    offset, count, names_at = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 60)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + 64 * index) for index in range(count)]
    if any(kind != 8 and start + size > len(data) for _, kind, _, _, start, size, *_ in sections):  # 8: SHT_NOBITS
        raise CubinError("it is cut short")

    def text(table: int, at: int) -> str:
        start = sections[table][4] + at
        return data[start : data.index(b"\0", start)].decode()

    by_name = {text(names_at, section[0]): section for section in sections}
    code = by_name.get(f".text.{kernel}")
    info = by_name.get(".nv.info")
    if code is None or info is None:
        raise CubinError(f"it has no kernel {kernel}")
    symbols, values = sections[info[6]], {}
    at, end = info[4], info[4] + info[5]
    while at + 4 <= end:
        shape, attribute, size = struct.unpack_from("<BBH", data, at)
        if shape == SIZED and attribute in (FRAME_SIZE, REGISTERS):
            symbol, value = struct.unpack_from("<II", data, at + 4)
            if text(symbols[6], struct.unpack_from("<I", data, symbols[4] + 24 * symbol)[0]) == kernel:
                values[attribute] = value
        at += 4 + (size if shape == SIZED else 0)
    return CubinFacts(registers=values.get(REGISTERS, 0), local_bytes=values.get(FRAME_SIZE, 0), code_bytes=code[5])
