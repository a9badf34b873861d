"""Unpacks the kernel from an x86 boot image: unpack.py IMAGE OUTPUT.

The header has the position of the payload in setup_sects, payload_offset and payload_length
(Documentation/arch/x86/boot.rst). The output is an ELF file; QEMU boots it through its PVH note.
"""

import lzma
import struct
import subprocess
import sys

image = open(sys.argv[1], "rb").read()
if image[0x202:0x206] != b"HdrS":
    sys.exit(f"{sys.argv[1]} is not an x86 boot image")
protected = ((image[0x1F1] or 4) + 1) * 512
offset, length = struct.unpack_from("<II", image, 0x248)
payload = image[protected + offset :][:length]
# The payload ends with its unpacked length.
body, size = payload[:-4], struct.unpack("<I", payload[-4:])[0]
if body.startswith(b"\x28\xb5\x2f\xfd"):
    content = subprocess.run(["zstd", "-dc"], input=body, stdout=subprocess.PIPE, check=True).stdout
elif body.startswith(b"\xfd7zXZ\0"):
    content = lzma.decompress(body)
else:
    sys.exit(f"{sys.argv[1]}: neither zstd nor xz, the payload begins with {body[:6].hex()}")
if len(content) != size or not content.startswith(b"\x7fELF"):
    sys.exit(f"{sys.argv[1]}: unpacked {len(content)} of {size} bytes, or no ELF file")
open(sys.argv[2], "wb").write(content)
