"""Builds hdma._core from csrc/ and nanobind, in parallel, compiling again only what changed. The rest is setup.cfg."""

from __future__ import annotations

import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CXXFLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fPIC", "-pthread", "-ffunction-sections", "-fdata-sections"]
# Without -fno-trapping-math the compiler may not turn comparisons of floats into vector code.
OURS = ["-Wall", "-Wextra", "-fno-trapping-math"]
# What the assembler reads (.incbin), of which the compiler knows nothing.
EMBEDDED = {"csrc/kernels/source.cc": ["csrc/kernels/reduce_gpu.cu"]}
NANOBIND = ["-fno-strict-aliasing", "-DNB_COMPACT_ASSERTIONS", "-w"]


class Build(build_ext):
    def build_extension(self, ext: Extension) -> None:
        # Imported here so that metadata can be asked for without it.
        import nanobind

        src, include = Path(nanobind.source_dir()), nanobind.include_dir()
        robin_map = str(src.parent / "ext" / "robin_map" / "include")
        # A fixed folder: an editable install builds in a temporary one, which would forget what is up to date.
        folder = os.path.join("build", "objects-" + self.get_ext_filename("core").split(".", 1)[1])

        def compile_one(source: str) -> str:
            ours = source.startswith("csrc")
            flags = CXXFLAGS + (OURS if ours else NANOBIND)
            (target,) = self.compiler.object_filenames([source], output_dir=folder)
            depends = target + ".d"
            if not up_to_date(target, depends, EMBEDDED.get(source, [])):
                includes = ["csrc", include, robin_map]
                flags = [*flags, "-MD", "-MF", depends]
                self.compiler.compile([source], output_dir=folder, include_dirs=includes, extra_postargs=flags)
            return target

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_one, [str(src / "nb_combined.cpp"), *ext.sources]))
        path = self.get_ext_fullpath(ext.name)
        link = ["-pthread", "-Wl,--gc-sections", "-Wl,-s"]
        self.compiler.link_shared_object(objects, path + ".new", extra_postargs=link, target_lang="c++")
        os.replace(path + ".new", path)


def up_to_date(target: str, depends: str, embedded: list[str]) -> bool:
    """Whether `target` is newer than this file and than every file that its last compilation read."""
    try:
        made = os.stat(target).st_mtime
        read = shlex.split(Path(depends).read_text().replace("\\\n", " ").split(":", 1)[1])
        return all(os.stat(path).st_mtime < made for path in [*read, *embedded, __file__])
    except OSError:
        return False


SOURCES = sorted(glob("csrc/**/*.cc", recursive=True))
setup(ext_modules=[Extension("hdma._core", SOURCES)], cmdclass={"build_ext": Build})
