"""What pyproject.toml cannot say: the native library knows nothing of Python, so one wheel serves every version."""

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class AnyPython(bdist_wheel):
    """A wheel for the platform, and for every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class PlainLibrary(build_ext):
    """A library whose file name contains no Python version, and which knows the sources that it was built from."""

    def build_extension(self, ext: Extension) -> None:
        digest = runpy.run_path("kernels/sources.py")["digest"](Path("kernels/cpu"))
        ext.define_macros.append(("SOURCES", f'"{digest}"'))
        super().build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', os.sep)}.so"


setup(cmdclass={"bdist_wheel": AnyPython, "build_ext": PlainLibrary})
