"""All metadata is in pyproject.toml. This file builds csrc_meta, and only if MHC_BUILD_META=1."""

import os
import pathlib
import runpy
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError

ROOT = pathlib.Path(__file__).resolve().parent


class BuildMeta(build_ext):
    """One shared library without a line of Python in it, named for the torch that it needs."""

    def get_ext_filename(self, fullname):
        import torch

        library = runpy.run_path(str(ROOT / "mhc_ops" / "meta_library.py"))
        name = library["file_name"](torch.__version__)
        return os.path.join(*fullname.split(".")[:-1], name)

    def build_extension(self, ext):
        from torch.utils.cpp_extension import include_paths, library_paths

        generated = pathlib.Path(self.build_temp).resolve() / "operators.inc"
        generate = [sys.executable, str(ROOT / "csrc_meta" / "generate.py"), str(generated)]
        subprocess.run(generate, check=True)
        ext.include_dirs += [str(generated.parent), *include_paths()]
        ext.library_dirs += library_paths()
        try:
            super().build_extension(ext)
        except CCompilerError as error:
            sys.exit(f"mhc_ops: MHC_BUILD_META=1 needs a compiler that knows C++20: {error}")


def meta_library():
    try:
        import torch  # noqa: F401
    except ImportError:
        sys.exit("mhc_ops: MHC_BUILD_META=1 needs torch, and pip's --no-build-isolation")
    extension = Extension(
        "mhc_ops.libmhc_meta",
        ["csrc_meta/check.cpp", "csrc_meta/register.cpp"],
        depends=["csrc_meta/contract.h", "mhc_ops/schemas.txt"],
        extra_compile_args=["-std=c++20", "-O1", "-g0"],  # nothing in it is hot
        libraries=["c10", "torch_cpu"],
        language="c++",
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildMeta}}


setup(**(meta_library() if os.environ.get("MHC_BUILD_META") == "1" else {}))
