"""unpack.py IMAGE TO: what is in a kernel's image, by its header (Documentation/arch/x86/boot.rst): setup_sects, payload_offset and
payload_length. An ELF file, which QEMU boots by its note for PVH.
"""

import lzma
import struct
import subprocess
import sys

image = open(sys.argv[1], "rb").read()
if image[0x202:0x206] != b"HdrS":
    sys.exit(f"{sys.argv[1]} is no kernel's image")
protected = ((image[0x1F1] or 4) + 1) * 512
offset, length = struct.unpack_from("<II", image, 0x248)
payload = image[protected + offset :][:length]
# Its length when unpacked comes last.
body, size = payload[:-4], struct.unpack("<I", payload[-4:])[0]
if body.startswith(b"\x28\xb5\x2f\xfd"):
    content = subprocess.run(["zstd", "-dc"], input=body, stdout=subprocess.PIPE, check=True).stdout
elif body.startswith(b"\xfd7zXZ\0"):
    content = lzma.decompress(body)
else:
    sys.exit(f"{sys.argv[1]} is packed in another way: {body[:6].hex()}")
if len(content) != size or not content.startswith(b"\x7fELF"):
    sys.exit(f"{sys.argv[1]}: {len(content)} bytes instead of {size}, or no ELF file")
open(sys.argv[2], "wb").write(content)
