"""Builds `smpar._native` with CMake; everything else about the project is in pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """One CMake configure and build per extension, its result put where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        import nanobind

        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        work = Path(self.build_temp).resolve() / ext.name
        work.mkdir(parents=True, exist_ok=True)
        # A cache left by another build environment names a generator and a Python that may be gone.
        (work / "CMakeCache.txt").unlink(missing_ok=True)
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(work),
            "-G",
            "Ninja",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={nanobind.cmake_dir()}",
        ]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(work), "--parallel", str(os.cpu_count() or 1)], check=True)


setup(ext_modules=[Extension("smpar._native", sources=[])], cmdclass={"build_ext": CMakeBuild})
