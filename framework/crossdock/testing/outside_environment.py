"""A Python environment of its own that sees this one's packages: to install a package as a stranger would, without a network."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import attrs


@attrs.frozen(kw_only=True)
class OutsideEnvironment:
    """A virtual environment in ``folder``. What is installed into it is not seen by the environment that made it."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @staticmethod
    def create(folder: Path) -> OutsideEnvironment:
        """Makes it, with this environment's packages (editable ones too) behind its own."""
        venv.create(folder, with_pip=False, symlinks=True)
        environment = OutsideEnvironment(folder=folder)
        shown = environment.run(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        here = sysconfig.get_path("purelib")
        Path(shown.stdout.strip(), "behind.pth").write_text(
            f"import site; site.addsitedir({here!r})\n", encoding="utf-8"
        )
        return environment

    def install(self, package: Path) -> None:
        """Builds and installs a package folder; its dependencies must be there already."""
        words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", str(package)]
        self.run([*words, "--prefix", str(self.folder)])

    def run(
        self, words: Sequence[str], *, timeout_s: float = 120.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs its interpreter with these words.

        Raises:
            AssertionError: ``check`` and a failure; with what the command wrote.
        """
        command = [str(self.python) if self.python.exists() else sys.executable, *words]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=self.folder)
        if check and ran.returncode != 0:
            raise AssertionError(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}")
        return ran
