"""All metadata is in pyproject.toml. This file is here for the C++ schemas that come later."""

from setuptools import setup

setup()
