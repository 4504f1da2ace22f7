"""As much of ELF as the checks need: is a file complete, which machine and GPU is it for, what does a kernel use."""

import struct
from dataclasses import dataclass

EM_CUDA = 190
_NOBITS = 8
_REGISTERS, _FRAME_SIZE = 0x2F, 0x11  # attributes of .nv.info: (symbol, count) pairs
_REQUIRED_THREADS = 0x10  # attribute of .nv.info.KERNEL: three numbers


class ElfError(Exception):
    """The bytes are no complete ELF file; the message says "empty", "truncated" or what else is wrong."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section's name and bytes (empty for sections without any, such as shared memory)."""

    name: str
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Elf:
    """A complete 64-bit little-endian ELF file."""

    machine: int
    flags: int
    abi_version: int
    sections: tuple[Section, ...]

    def section(self, name: str) -> Section | None:
        """The section of that name, or None."""
        return next((section for section in self.sections if section.name == name), None)

    def gpu_arch(self) -> int:
        """Of a cubin: 10 * major + minor of its compute capability (from ABI version 8 on, one byte higher)."""
        return (self.flags >> 8) & 0xFF if self.abi_version >= 8 else self.flags & 0xFF

    def kernels(self) -> list[str]:
        """Of a cubin: names of the functions it holds."""
        return [s.name.removeprefix(".text.") for s in self.sections if s.name.startswith(".text.")]


def parse(content: bytes) -> Elf:
    """Parse a whole file; raises ElfError when a byte is missing at its end, too."""
    if not content:
        raise ElfError("empty")
    if content[:4] != b"\x7fELF":
        raise ElfError("no ELF file")
    if len(content) < 64:
        raise ElfError("truncated")
    if content[4:6] != b"\x02\x01":
        raise ElfError("no 64-bit little-endian ELF file")
    abi_version = content[8]
    (machine,) = struct.unpack_from("<H", content, 18)
    program_at, sections_at, flags = struct.unpack_from("<QQI", content, 32)
    program_size, program_count, section_size, section_count, names_index = struct.unpack_from("<HHHHH", content, 54)
    end = max(program_at + program_size * program_count, sections_at + section_size * section_count)
    if end > len(content):
        raise ElfError("truncated")
    if section_count == 0 or section_size != 64 or names_index >= section_count:
        raise ElfError("no section table")
    headers = [struct.unpack_from("<IIQQQQIIQQ", content, sections_at + 64 * i) for i in range(section_count)]
    if any(kind != _NOBITS and offset + size > len(content) for _, kind, _, _, offset, size, *_ in headers):
        raise ElfError("truncated")
    names_at, names_size = headers[names_index][4:6]
    names = content[names_at : names_at + names_size]
    sections = tuple(
        Section(
            name=names[name : names.find(b"\0", name)].decode(errors="replace"),
            data=b"" if kind == _NOBITS else content[offset : offset + size],
        )
        for name, kind, _, _, offset, size, *_ in headers
    )
    return Elf(machine=machine, flags=flags, abi_version=abi_version, sections=sections)


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    """The (attribute, payload) records of a .nv.info section; only those with a payload of their own."""
    records = []
    position = 0
    while position + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, position)
        position += 4
        if form == 4:  # size bytes follow; in the other forms, the value is in place of the size
            records.append((attribute, data[position : position + size]))
            position += size
    return records


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a kernel uses per thread (registers, bytes of local memory) and per block (threads, None if not fixed)."""

    registers: int | None
    local_bytes: int | None
    threads: int | None


def usage(elf: Elf, kernel: str) -> Usage:
    """What one kernel of a cubin with a single kernel uses; None for what the cubin doesn't tell."""
    found: dict[int, int] = {}
    common = elf.section(".nv.info")
    for attribute, payload in _attributes(common.data if common else b""):
        if attribute in (_REGISTERS, _FRAME_SIZE) and len(payload) == 8:
            value = struct.unpack("<II", payload)[1]
            found[attribute] = max(value, found.get(attribute, 0))
    own = elf.section(f".nv.info.{kernel}")
    threads = None
    for attribute, payload in _attributes(own.data if own else b""):
        if attribute == _REQUIRED_THREADS and len(payload) == 12:
            x, y, z = struct.unpack("<III", payload)
            threads = x * y * z
    return Usage(registers=found.get(_REGISTERS), local_bytes=found.get(_FRAME_SIZE), threads=threads)
