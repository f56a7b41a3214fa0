"""Chains on two hosts, played by two processes that find each other by jax.distributed, against one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import numpy as np

from .example_tools import FOLDER, load


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_two_hosts_sample_what_one_does(tmp_path):
    together = ["--coordinator", f"127.0.0.1:{_free_port()}", "--hosts", "2", "--out", str(tmp_path)]
    command = [sys.executable, str(FOLDER / "multihost.py"), *together]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    hosts = [
        subprocess.Popen(
            [*command, "--host", str(host)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for host in (0, 1)
    ]
    try:
        example = load("multihost")
        wanted = example.sampled(np.arange(example.CHAINS)).theta
        for host in hosts:
            said, _ = host.communicate(timeout=120)
            assert host.returncode == 0, said.decode()
    finally:
        for host in hosts:
            host.kill()
    found = np.load(tmp_path / "theta.npy")
    assert [np.load(tmp_path / f"part-{host}.npy").shape[0] for host in (0, 1)] == [6, 6]
    # Other numbers of chains at a time may round otherwise in float32; wrong numbers of chains are far off.
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
    assert np.abs(found[:6] - found[6:]).max() > 0.01
