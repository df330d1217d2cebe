"""Gives the installed package its `__init__.py`, which has `trine.__version__`: for `pip install`.

The repository's root has none: tools would take the clone, under whatever name, for a package.
pyproject.toml names this class.
"""

from pathlib import Path

from setuptools.command.build_py import build_py

TEXT = '''"""Trine, installed: its programs are the commands trine-train, trine-plan and so on."""

__version__ = "{version}"
'''


class BuildWithVersion(build_py):
    """Copies the modules, as setuptools does, and writes trine/__init__.py."""

    def run(self) -> None:
        """Build into the folder that the wheel is made of."""
        super().run()
        version = self.distribution.get_version()
        Path(self.build_lib, "trine", "__init__.py").write_text(TEXT.format(version=version))
