"""The guard of the unit tests works."""

import os
import socket
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "touch",
    [
        lambda: subprocess.run([sys.executable, "-c", ""], check=False),
        lambda: subprocess.check_output(["true"]),
        lambda: os.system("true"),
        lambda: os.fork(),
        lambda: socket.create_connection(("127.0.0.1", 9)),
        lambda: socket.socket().connect(("127.0.0.1", 9)),
        lambda: socket.getaddrinfo("localhost", 80),
    ],
)
def test_the_outside_world_is_out_of_reach(touch) -> None:
    with pytest.raises(pytest.fail.Exception, match="outside world"):
        touch()
