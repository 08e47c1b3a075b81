"""Puts firstnan.pth next to the package; everything else about the build is in pyproject.toml.

Python runs the line in that file when it starts, so `FIRSTNAN=1 python train.py` needs no other command.
"""

from setuptools import Distribution, setup


class WithData(Distribution):
    has_data = Distribution.has_data_files  # an editable install asks for it by this name


class InstallNextToPackage(Distribution().get_command_class("install_data")):
    """Data files go into site-packages, in wheels and in editable installs alike."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.install_dir = self.get_finalized_command("install").install_lib


setup(
    distclass=WithData,
    data_files=[("", ["firstnan.pth"])],
    cmdclass={"install_data": InstallNextToPackage},
)
