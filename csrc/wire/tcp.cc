// wire/tcp: puts over TCP sockets, one for each (rail peer, lane).
//
// Protocol: a stream of messages, each a Header and its payload. The receiver takes the payload straight into its
// window, then reports the flag.
//
//     | magic | flag | value | offset | nbytes | fingerprint | payload ... |
//
// The sockets come connected and authenticated (hdma/connect.py); a header that does not fit this communicator is an
// error all the same, so that a stray byte never becomes a write out of bounds.
//
// Threading: see wire.h; one thread, non-blocking sockets, one epoll.
//
// Ordering: TCP keeps the order of a (peer, lane); the flag is reported after the last payload byte was copied.
// The kernel has copied the source when send returns: that is the local completion.
#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <deque>

#include "wire.h"

namespace hdma {

namespace {

// Few, so that a late put of a small chunk does not queue behind many large ones.
constexpr size_t kOutstanding = 4;
constexpr uint32_t kMagic = 0x68646d61;

struct Header {
    uint32_t magic, flag, value, reserved;
    uint64_t offset, nbytes;
    Fingerprint fingerprint;
};

struct Connection {
    int peer;
    Lane lane;
    Fd fd;
    bool lost = false, blocked = false;
    std::deque<Put> queue;  // the front is being sent
    Header out;
    size_t out_done = 0;    // header and payload bytes of the front already sent
    Header in;
    size_t in_done = 0;
};

class Tcp final : public Wire {
  public:
    Tcp(int rank, std::vector<LinkPart> parts, Landing landing, Sink &sink)
        : rank_(rank), landing_(std::move(landing)), sink_(sink), connections_(parts.size()) {
        for (size_t i = 0; i < parts.size(); ++i) {
            connections_[i].peer = parts[i].peer;
            connections_[i].lane = parts[i].lane;
            connections_[i].fd = std::move(parts[i].fd);
        }
        epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
        if (!epoll_.valid()) throw Error(Kind::Wire, format("rank %d: epoll_create1: %s", rank, errno_text(errno).c_str()));
        for (Connection &c : connections_) watch(c, EPOLL_CTL_ADD, EPOLLIN);
    }

    bool post(const Put &put) override {
        Connection &c = find(put.peer, put.lane);
        if (c.lost) {  // The peer has closed, or its loss is being reported: nobody waits for this put.
            if (put.local_flag >= 0) sink_.sent(put.local_flag, put.local_value);
            return true;
        }
        if (c.queue.size() >= kOutstanding) return false;
        c.queue.push_back(put);
        if (c.queue.size() == 1) start(c);
        if (!c.blocked) send(c);
        return true;
    }

    bool progress() override {
        epoll_event events[64];
        int count = epoll_wait(epoll_.get(), events, 64, 0);
        for (int i = 0; i < count; ++i) {
            Connection &c = connections_[events[i].data.u64];
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c);
            if (events[i].events & EPOLLOUT && !c.lost) {
                c.blocked = false;
                send(c);
                if (!c.blocked) watch(c, EPOLL_CTL_MOD, EPOLLIN);
            }
        }
        return count > 0;
    }

    int fd() const override { return epoll_.get(); }

    bool drained() override {
        for (Connection &c : connections_) {
            int unsent = 0;
            if (!c.lost && (!c.queue.empty() || (ioctl(c.fd.get(), SIOCOUTQ, &unsent) == 0 && unsent > 0))) return false;
        }
        return true;
    }

    uint64_t sent_nbytes() override {
        uint64_t sum = 0;
        for (Connection &c : connections_) {
            tcp_info info{};
            socklen_t length = sizeof info;
            if (getsockopt(c.fd.get(), IPPROTO_TCP, TCP_INFO, &info, &length) == 0)
                sum += info.tcpi_bytes_sent - info.tcpi_bytes_retrans;
        }
        return sum;
    }

  private:
    Connection &find(int peer, Lane lane) {
        for (Connection &c : connections_)
            if (c.peer == peer && c.lane == lane) return c;
        throw Error(Kind::Error, format("rank %d has no connection to rank %d", rank_, peer));
    }

    void watch(Connection &c, int operation, uint32_t events) {
        epoll_event event{};
        event.events = events;
        event.data.u64 = static_cast<uint64_t>(&c - connections_.data());
        if (epoll_ctl(epoll_.get(), operation, c.fd.get(), &event) < 0)
            throw Error(Kind::Wire, format("rank %d: epoll_ctl for rank %d: %s", rank_, c.peer, errno_text(errno).c_str()));
    }

    void lose(Connection &c, const std::string &reason) {
        if (c.lost) return;
        c.lost = true;
        epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, c.fd.get(), nullptr);
        for (const Put &put : c.queue)
            if (put.local_flag >= 0) sink_.sent(put.local_flag, put.local_value);
        c.queue.clear();
        sink_.lost(c.peer, format("its TCP connection ended: %s", reason.c_str()));
    }

    void start(Connection &c) {
        const Put &put = c.queue.front();
        c.out = Header{kMagic, put.flag, put.value, 0, put.offset, put.nbytes, put.fingerprint};
        c.out_done = 0;
    }

    void send(Connection &c) {
        while (!c.queue.empty()) {
            const Put &put = c.queue.front();
            size_t total = sizeof(Header) + put.nbytes;
            iovec parts[2];
            int count = 0;
            size_t payload_done = c.out_done > sizeof(Header) ? c.out_done - sizeof(Header) : 0;
            if (c.out_done < sizeof(Header))
                parts[count++] = {reinterpret_cast<char *>(&c.out) + c.out_done, sizeof(Header) - c.out_done};
            if (payload_done < put.nbytes)
                parts[count++] = {const_cast<char *>(put.src) + payload_done, put.nbytes - payload_done};
            msghdr message{};
            message.msg_iov = parts;
            message.msg_iovlen = count;
            ssize_t n = sendmsg(c.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (n < 0) {
                if (errno == EINTR) continue;
                if (errno == EAGAIN || errno == EWOULDBLOCK) {
                    c.blocked = true;
                    watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
                } else {
                    lose(c, "send: " + errno_text(errno));
                }
                return;
            }
            c.out_done += n;
            if (c.out_done < total) continue;
            if (put.local_flag >= 0) sink_.sent(put.local_flag, put.local_value);
            c.queue.pop_front();
            if (!c.queue.empty()) start(c);
        }
    }

    void receive(Connection &c) {
        // One message an event: the others of the epoll set get their turn in between.
        while (!c.lost) {
            bool header = c.in_done < sizeof(Header);
            char *to = header ? reinterpret_cast<char *>(&c.in) + c.in_done
                              : landing_.window + c.in.offset + (c.in_done - sizeof(Header));
            size_t want = header ? sizeof(Header) - c.in_done : sizeof(Header) + c.in.nbytes - c.in_done;
            ssize_t n = recv(c.fd.get(), to, want, MSG_DONTWAIT);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
            if (n <= 0) return lose(c, n == 0 ? "connection closed by peer" : "recv: " + errno_text(errno));
            c.in_done += n;
            if (header && c.in_done == sizeof(Header) && !valid(c)) return;
            if (c.in_done == sizeof(Header) + (c.in_done >= sizeof(Header) ? c.in.nbytes : 1)) {
                c.in_done = 0;
                sink_.arrived(c.in.flag, c.in.value);
                return;
            }
        }
    }

    bool valid(Connection &c) {
        const Header &h = c.in;
        if (h.magic != kMagic || h.flag >= landing_.flag_count || h.nbytes > landing_.window_nbytes ||
            h.offset > landing_.window_nbytes - h.nbytes) {
            sink_.garbled(c.peer, format("a message with magic %08x, flag %u, %llu bytes at %llu", h.magic, h.flag,
                                         static_cast<unsigned long long>(h.nbytes),
                                         static_cast<unsigned long long>(h.offset)));
            lose(c, "garbled stream");
            return false;
        }
        sink_.announced(c.peer, h.fingerprint);
        return true;
    }

    int rank_;
    Landing landing_;
    Sink &sink_;
    std::vector<Connection> connections_;
    Fd epoll_;
};

}  // namespace

std::unique_ptr<Wire> tcp_wire(int rank, std::vector<LinkPart> parts, Landing landing, Wire::Sink &sink) {
    return std::make_unique<Tcp>(rank, std::move(parts), std::move(landing), sink);
}

}  // namespace hdma
