"""Package metadata: what tfparallel is called, what it needs and the command it installs."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """Return `__version__` of tfparallel/version.py without importing the package."""
    source = (ROOT / "tfparallel" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('Expected a line `__version__ = "..."` in tfparallel/version.py.')
    return match.group(1)


# TensorFlow comes as several packages that cannot live side by side (tensorflow,
# tensorflow-cpu, tensorflow-tpu), so none of them is a hard requirement: an extra chooses one.
EXTRAS = {
    "cpu": ["tensorflow-cpu>=2.20,<2.22"],
    "gpu": ["tensorflow[and-cuda]>=2.20,<2.22"],
    "tpu": ["tensorflow-tpu>=2.20,<2.21"],  # 2.20 is the newest that exists
    # What Horovod needs. Horovod itself does not compile from the package index against these
    # versions of TensorFlow: `python -m tfparallel.build_horovod` builds it.
    "horovod": ["cloudpickle>=2", "packaging", "pyyaml", "psutil", "setuptools", "wheel"],
    "plot": ["matplotlib>=3.8"],
    "remote": ["fsspec>=2024.6"],  # backups in object stores; with s3fs or gcsfs
    "dev": [
        "dill>=0.3",  # dill, portpicker, tblib: TensorFlow's own tests of several processes
        "fsspec>=2024.6",
        "hypothesis>=6.100",
        "jsonschema>=4.20",
        "matplotlib>=3.8",
        "mkdocs-material>=9.5",
        "mkdocstrings[python]>=0.26",
        "mypy>=1.11",
        "portpicker>=1.6",
        # pytest-xdist 3.8 sees no groups in 9.2: https://github.com/pytest-dev/pytest-xdist/issues/1386
        "pytest>=8,<9.2",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.8",
        "ruff>=0.6",
        "safetensors>=0.4",
        "tblib>=3",
        "tensorboard>=2.20",
        "types-PyYAML",
        "types-psutil",
    ],
}

setup(
    name="tfparallel",
    version=read_version(),
    description="Distribution strategies for Keras 3 on TensorFlow",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["tfparallel", "tfparallel.*"]),
    package_data={"tfparallel": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        "absl-py>=2.0",
        "keras>=3.12,<3.16",
        "numpy>=1.26",
        "packaging>=23",
        "psutil>=5.9",
        "pydantic>=2.6,<3",
        "pyyaml>=6.0",
        "rich>=13.0",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["tfparallel=tfparallel.launch.cli:main"]},
)
