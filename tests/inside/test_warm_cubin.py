"""Registers, local memory and code size, read from a hand-made cubin; and every way it can be damaged."""

import struct

import pytest
from blackwell.warm import cubin

KERNEL = "add_kernel"
CODE = b"\xaa" * 384


def string_table(names: list[str]) -> tuple[bytes, dict[str, int]]:
    data, at = b"\0", {}
    for name in names:
        at[name] = len(data)
        data += name.encode() + b"\0"
    return data, at


def record(attribute: int, *words: int) -> bytes:
    value = struct.pack(f"<{len(words)}I", *words)
    return struct.pack("<BBH", 4, attribute, len(value)) + value


def make_cubin(registers: int, frame: int, kernel: str = KERNEL) -> bytes:
    """A 64-bit ELF with the sections that matter; symbol 1 is another kernel, symbol 2 the wanted one."""
    names, at = string_table([".shstrtab", ".strtab", ".symtab", ".nv.info", f".text.{kernel}"])
    strings, symbol_at = string_table(["other", kernel])
    symbols = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", symbol_at[name], 18, 0, 5, 0, 0) for name in ("other", kernel)
    )
    info = b"".join(
        [
            record(cubin.REGISTERS, 1, 7),
            struct.pack("<BBH", 3, 0x1B, 255),  # a record with its value in place
            record(cubin.REGISTERS, 2, registers),
            record(cubin.FRAME_SIZE, 2, frame),
            record(0x12, 2, 99),
        ]
    )
    bodies = [
        (names, ".shstrtab", 3, 0),
        (strings, ".strtab", 3, 0),
        (symbols, ".symtab", 2, 2),
        (info, ".nv.info", 1, 3),
        (CODE, f".text.{kernel}", 1, 0),
    ]
    data, headers = bytearray(64), [bytes(64)]
    for body, name, kind, link in bodies:
        headers.append(struct.pack("<IIQQQQIIQQ", at[name], kind, 0, 0, len(data), len(body), link, 0, 1, 0))
        data += body
    start = len(data)
    data += b"".join(headers)
    data[:64] = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01\x33\x07", 2, 190, 1, 0, 0, start, 0, 64, 0, 0, 64, len(headers), 1
    )
    return bytes(data)


def test_facts_of_the_named_kernel_only() -> None:
    facts = cubin.read(make_cubin(registers=168, frame=40), KERNEL)
    assert facts == cubin.CubinFacts(registers=168, local_bytes=40, code_bytes=len(CODE))
    assert facts.spills == 10


@pytest.mark.parametrize("damage", ["empty", "not elf", "header only", "cut", "other kernel"])
def test_damage_is_an_error_with_a_reason(damage: str) -> None:
    whole = make_cubin(1, 1)
    data = {
        "empty": b"",
        "not elf": b"#!" + whole[2:],
        "header only": whole[:64],
        "cut": whole[: len(whole) // 2],
        "other kernel": make_cubin(1, 1, "k2"),
    }
    with pytest.raises(cubin.CubinError, match=KERNEL):
        cubin.read(data[damage], KERNEL)
