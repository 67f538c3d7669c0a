#!/bin/sh
# A RoCEv2 capture in which a byte was changed looks sound to tshark.
#
# Expected: as for TCP, UDP and IPv4, Wireshark compares the checksum of a RoCE packet, or can be
#     told to: then `tshark -z expert`, or a filter, finds the damaged packet.
# Happens:  the "Invariant CRC" (ICRC) is printed but never compared.  A wrong one is neither marked
#     nor an expert item, and no preference of the protocol turns a check on.
# Versions: tshark 4.0.17 of Debian 12.
# Affects:  those who look for damage between two adapters (a switch, a tunnel, an offload that
#     rewrites the UDP checksum as 0): the capture does not show it.  Compute the ICRC.
. "$(dirname "$0")/lib.sh"

needs python3
packages tshark=4.0.17-0+deb12u3

python3 - "$tmp/right.pcap" "$tmp/wrong.pcap" <<'END'
import struct
import sys
import zlib


def ip_checksum(header: bytes) -> int:
    total = sum(struct.unpack("!10H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


payload = b"sixteen letters!"
# A SEND of one packet to queue pair 17, with partition 0xffff and sequence number 1.
bth = struct.pack("!BBHII", 0x04, 0x40, 0xFFFF, 17, 1)
udp = struct.pack("!HHHH", 49152, 4791, 8 + len(bth) + len(payload) + 4, 0)
address = bytes([10, 80, 0, 1]), bytes([10, 80, 0, 2])
length = 20 + len(udp) + len(bth) + len(payload) + 4


def ip(tos: int, ttl: int, checksum: int) -> bytes:
    head = struct.pack("!BBHHHBBH", 0x45, tos, length, 0, 0x4000, ttl, 17, checksum)
    return head + address[0] + address[1]


# What routers may change counts as ones: the invariant part alone is covered.
covered = b"\xff" * 8 + ip(0xFF, 0xFF, 0xFFFF) + udp[:6] + b"\xff\xff" + bth[:4] + b"\xff" + bth[5:]
icrc = struct.pack("<I", zlib.crc32(covered + payload))
ethernet = b"\x02\0\0\0\0\x02" + b"\x02\0\0\0\0\x01" + b"\x08\0"
for name, data in zip(sys.argv[1:], (payload, payload.swapcase()), strict=True):
    packet = ethernet + ip(0, 64, ip_checksum(ip(0, 64, 0))) + udp + bth + data + icrc
    with open(name, "wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1))
        file.write(struct.pack("<IIII", 0, 0, len(packet), len(packet)) + packet)
END

tshark() {
    HOME=$tmp "$root/lib64/ld-linux-x86-64.so.2" \
        --library-path "$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu" \
        "$root/usr/bin/tshark" "$@" 2>>"$tmp/log"
}
{
    tshark --version | head -n 1
    for name in right wrong; do
        tshark -V -o ip.check_checksum:TRUE -r "$tmp/$name.pcap" >"$tmp/$name"
        echo "$name: $(grep -A 1 'Invariant CRC' "$tmp/$name" | tr '\n' ' ')"
        echo "$name: $(grep -Eic 'incorrect|bad|should be|invalid|malformed|expert' "$tmp/$name") complaints"
        echo "$name: $(tshark -q -z expert -r "$tmp/$name.pcap" | grep -c .) lines of expert items"
    done
    echo "lines that differ but for the payload: $(diff "$tmp/right" "$tmp/wrong" | grep '^>' | grep -vc '^> *[Dd0]')"
    echo "preferences about a check: $(tshark -G defaultprefs | grep -Ec '^#?infiniband.*(crc|check)')"
    grep -c 'Header checksum status: Good' "$tmp/right" | sed 's/^/right: checksums of IPv4 that were compared: /'
} >"$seen"
show
expect "the ICRC is shown" "^wrong: .*Invariant CRC: 0x[0-9a-f]{8}"
expect "that of a damaged packet is no complaint" "^wrong: 0 complaints"
expect "nor an expert item" "^wrong: 0 lines of expert"
expect "no preference turns a check on" "^preferences about a check: 0"
expect "while the checksum of IPv4 is compared" "compared: 1"
as_described
