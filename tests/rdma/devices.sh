# RDMA devices rxe0 (10.9.0.1, fd09::1) and rxe1 (10.9.0.2, fd09::2) on the two ends, va and vb, of one cable.
set -e
ip link set lo up
ip link add va type veth peer name vb
# Both ends are this machine's: it must take packets from its own addresses. Addresses are to be there at once.
for end in all va vb; do
    echo 1 >/proc/sys/net/ipv4/conf/$end/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/$end/rp_filter
    echo 0 >/proc/sys/net/ipv6/conf/$end/accept_dad
done
# RDMA's largest packets carry 4096 bytes, and need 4200.
for end in va vb; do ip link set $end mtu 9000 up; done
ip addr add 10.9.0.1/24 dev va
ip addr add 10.9.0.2/24 dev vb
ip addr add fd09::1/64 dev va nodad
ip addr add fd09::2/64 dev vb nodad
# Linux sends what is for another address of its own by way of lo, for IPv6 even from a socket that names its end.
table=100
for end in va vb; do
    ip -6 route add fd09::/64 dev $end table $table
    ip -6 rule add pref $table oif $end lookup $table
    table=$((table + 1))
done
ip -6 rule add pref 200 lookup local
ip -6 rule del pref 0
rdma link add rxe0 type rxe netdev va
rdma link add rxe1 type rxe netdev vb

# GIDs 0, 1 and 2: the link-local, the IPv4 and the IPv6 address.
ready() {
    grep -q ACTIVE "$1/state" && for gid in 0 1 2; do grep -q '[1-9a-f]' "$1/gids/$gid" || return 1; done
}
for device in rxe0 rxe1; do
    port=/sys/class/infiniband/$device/ports/1
    until ready $port; do
        if [ $SECONDS -ge 30 ]; then
            echo "$device does not come up: $(cat $port/state), GIDs $(head -qn1 $port/gids/[012] | xargs)"
            exit 1
        fi
        sleep 0.1
    done
done
