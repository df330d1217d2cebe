"""Imports what a rehearsal needs, the library for fake GPUs before torch; for fork_server.py."""

from tools.emulator import device_guard

device_guard.load()

from tools.emulator import answers, rehearsal  # noqa: F401
