"""Lets the kernel compute and check all checksums of some devices, as for network cards that cannot, and hand
over packets one by one: offload.py DEVICE...
"""

import array
import fcntl
import socket
import struct
import sys

SIOCETHTOOL = 0x8946
CHECKSUMS_IN, CHECKSUMS_OUT, JOINED_IN = 0x15, 0x17, 0x2C  # ETHTOOL_SRXCSUM, ETHTOOL_STXCSUM, ETHTOOL_SGRO


def switch_off(device: str, what: int) -> None:
    value = array.array("I", [what, 0])
    request = struct.pack("16sP", device.encode(), value.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, request)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for feature in (CHECKSUMS_IN, CHECKSUMS_OUT, JOINED_IN):
            switch_off(name, feature)
