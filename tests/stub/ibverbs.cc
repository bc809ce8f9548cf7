// ibverbs: a libibverbs.so.1 without RDMA devices: reliable queue pairs between processes of this host, so that hdma's
// RDMA wire runs, and fails, on any machine. What a real device does is shown in a virtual machine (tests/rdma).
//
// Protocol: posted requests lie in a queue until the process polls, and until their delay is over: sources are read
// late, as a device does. A write goes into the peer's memory by process_vm_writev, a message by a datagram to the
// peer's socket, whose name is the number of the queue pair; a GID holds the process's number. Environment:
//   STUB_IBV_DEVICES=mlx5_0,mlx5_1   the devices (default: these)
//   STUB_IBV_DELAY_US=n              each request executes up to n us after it was posted
//   STUB_IBV_MAX_MESSAGE=n           longest write, in bytes (default 1 GiB)
//   STUB_IBV_LATE=1                  writes, of 64 KiB at most, land 5 ms after the message behind them, unless the
//                                    device reads before
//   STUB_IBV_NO_DMABUF=1             no memory of a GPU can be registered
//   STUB_IBV_MTU=n                   of the ports (default 4096)
//   STUB_IBV_FORBIDDEN=1             no device can be opened
//   STUB_IBV_UNREACHABLE=1           no queue pair can be linked
//   STUB_IBV_MEMLOCK=n               bytes that a process may register
//   STUB_IBV_INLINE=n                bytes of inline data at most (default 256)
//   STUB_IBV_FAIL=kind:number:after  status: the completion of a request; event: an asynchronous event; from the
//                                    request of this number on ("status:12:5"); deaf: from there on nothing is sent or
//                                    executed, nor ever completes with success, but with status `number` after 1 s
//
// Threading: one lock around everything.
//
// Ordering: requests of a queue pair execute in order; a message is sent after the writes before it were done.
#include "../../csrc/wire/ibverbs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

using namespace hdma::ibv;

namespace hdma::ibv {
struct Device {
    std::string name;
    int number;
};
}  // namespace hdma::ibv

namespace {

constexpr size_t kLongestLate = 64 << 10;
std::recursive_mutex mutex_;
using Lock = std::lock_guard<std::recursive_mutex>;
uint64_t registered_nbytes = 0, executed = 0, deaf_since_us = 0;

uint64_t number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}
uint64_t now_us() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000ull + t.tv_nsec / 1000;
}

// What of STUB_IBV_FAIL holds for the request that is about to execute: its number, or 0.
uint64_t failing(const char *kind) {
    const char *text = getenv("STUB_IBV_FAIL");
    char word[16] = {};
    unsigned long long value = 0, after = 0;
    if (!text || sscanf(text, "%15[^:]:%llu:%llu", word, &value, &after) != 3 || strcmp(word, kind)) return 0;
    return executed >= after ? value : 0;
}

struct StubCq;
struct StubQp;

struct StubContext : Context {
    int number;
    std::deque<Event> events;
    bool event_told = false;
};
struct StubChannel : Channel {
    int timer;
    bool armed = false, ticking = false;

    void tick(bool on) {
        if (!on && !ticking) return;
        itimerspec when{};
        if (on) when.it_value.tv_nsec = 200 * 1000;
        timerfd_settime(timer, 0, &when, nullptr);
        ticking = on;
    }
};
struct StubCq : Cq {
    StubChannel *channel;
    std::deque<Completion> done;
    std::vector<StubQp *> qps;
};
struct Request {
    SendRequest request;
    std::vector<Piece> pieces;
    std::string inlined;
    uint64_t due_us;
};
struct StubQp : Qp {
    int socket;
    bool error = false;
    uint32_t remote = 0;
    int remote_pid = 0;
    uint32_t max_inline;
    std::deque<Request> sends;
    std::deque<std::pair<uint64_t, Piece>> receives;
};

sockaddr_un address_of(uint32_t qp_num, socklen_t &length) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    int n = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "stub-ibv-%u-%u", getuid(), qp_num);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
    return address;
}

void complete(StubCq *cq, StubQp *qp, uint64_t id, uint32_t status, uint32_t opcode) {
    Completion c{};
    c.wr_id = id;
    c.status = status;
    c.opcode = opcode;
    c.qp_num = qp->qp_num;
    c.vendor_error = status ? 0x51 : 0;
    cq->done.push_back(c);
}

// Writes that are under way on the bus: they land by themselves after a while, or before a read of the same device.
struct Late {
    static constexpr uint64_t kMagic = 0x6c617465206c6174;
    uint64_t magic, addr;
};
struct Landing {
    uint64_t addr, due_us;
    std::string bytes;
};
std::deque<Landing> under_way;

void land(uint64_t until_us) {
    while (!under_way.empty() && under_way.front().due_us <= until_us) {
        const Landing &first = under_way.front();
        std::memcpy(reinterpret_cast<void *>(first.addr), first.bytes.data(), first.bytes.size());
        under_way.pop_front();
    }
}

void take_late(int socket) {
    std::string bytes(kLongestLate + sizeof(Late), 0);
    bytes.resize(recv(socket, bytes.data(), bytes.size(), MSG_DONTWAIT));
    uint64_t addr;
    std::memcpy(&addr, bytes.data() + offsetof(Late, addr), sizeof addr);
    under_way.push_back({addr, now_us() + 5000, bytes.substr(sizeof(Late))});
}

// What has arrived into what is posted.
void deliver(StubQp *qp) {
    auto *cq = static_cast<StubCq *>(qp->recv_cq);
    Late next{};
    while (recv(qp->socket, &next, sizeof next, MSG_DONTWAIT | MSG_PEEK) > 0) {
        if (next.magic == Late::kMagic) {
            take_late(qp->socket);
            continue;
        }
        if (qp->receives.empty()) break;
        auto &[id, piece] = qp->receives.front();
        ssize_t n = recv(qp->socket, reinterpret_cast<void *>(piece.addr), piece.nbytes, MSG_DONTWAIT);
        complete(cq, qp, id, kSuccess, 128);
        cq->done.back().nbytes = static_cast<uint32_t>(n);
        qp->receives.pop_front();
    }
}

// Everything that is posted completes as flushed, behind the failure itself. What was acknowledged has arrived.
void fail(StubQp *qp) {
    auto *cq = static_cast<StubCq *>(qp->send_cq);
    deliver(qp);
    epoll_ctl(cq->channel->fd, EPOLL_CTL_DEL, qp->socket, nullptr);
    qp->error = true;
    for (const Request &each : qp->sends) complete(cq, qp, each.request.wr_id, kFlushed, 0);
    for (const auto &each : qp->receives) complete(cq, qp, each.first, kFlushed, 128);
    qp->sends.clear();
    qp->receives.clear();
}

// False where it cannot execute yet.
bool execute(StubQp *qp, Request &r) {
    if (uint64_t status = failing("deaf")) {
        if (!deaf_since_us) deaf_since_us = now_us();
        if (now_us() - deaf_since_us < 1000000) return false;
        complete(static_cast<StubCq *>(qp->send_cq), qp, r.request.wr_id, static_cast<uint32_t>(status), 0);
        qp->sends.pop_front();
        fail(qp);
        return false;
    }
    uint32_t status = static_cast<uint32_t>(failing("status"));
    auto *context = static_cast<StubContext *>(qp->context);
    if (uint64_t type = failing("event"); type && !context->event_told) {
        context->event_told = true;
        Event event{};
        event.type = static_cast<uint32_t>(type);
        if (type <= kQpAccessError) event.qp = qp;
        context->events.push_back(event);
        uint64_t one = 1;
        (void)!write(context->async_fd, &one, sizeof one);
    }
    if (!status && r.request.opcode == kRead) {
        land(~0ull);
        std::memcpy(reinterpret_cast<void *>(r.pieces[0].addr), reinterpret_cast<void *>(r.request.remote.addr),
                    r.pieces[0].nbytes);
    } else if (!status && r.request.opcode == kWrite && number("STUB_IBV_LATE", 0)) {
        Late late{Late::kMagic, r.request.remote.addr};
        std::string bytes(reinterpret_cast<char *>(&late), sizeof late);
        bytes.append(reinterpret_cast<char *>(r.pieces[0].addr), r.pieces[0].nbytes);
        socklen_t length;
        sockaddr_un to = address_of(qp->remote, length);
        if (sendto(qp->socket, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL, reinterpret_cast<sockaddr *>(&to), length) < 0) {
            if (errno == EAGAIN || errno == ENOBUFS) return false;
            status = kRetriesExceeded;
        }
    } else if (!status && r.request.opcode == kWrite) {
        iovec from{reinterpret_cast<void *>(r.pieces[0].addr), r.pieces[0].nbytes};
        iovec to{reinterpret_cast<void *>(r.request.remote.addr), r.pieces[0].nbytes};
        ssize_t n = process_vm_writev(qp->remote_pid, &from, 1, &to, 1, 0);
        if (n != static_cast<ssize_t>(from.iov_len)) status = errno == ESRCH ? kRetriesExceeded : kRemoteAccess;
    } else if (!status) {
        socklen_t length;
        sockaddr_un to = address_of(qp->remote, length);
        const void *from = (r.request.flags & kInline) ? r.inlined.data() : reinterpret_cast<void *>(r.pieces[0].addr);
        size_t nbytes = (r.request.flags & kInline) ? r.inlined.size() : r.pieces[0].nbytes;
        if (sendto(qp->socket, from, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL, reinterpret_cast<sockaddr *>(&to), length) < 0) {
            if (errno == EAGAIN || errno == ENOBUFS) return false;  // The receiver is not ready.
            status = kRetriesExceeded;
        }
    }
    ++executed;
    bool told = status || (r.request.flags & kSignaled);
    if (told) complete(static_cast<StubCq *>(qp->send_cq), qp, r.request.wr_id, status, 0);
    qp->sends.pop_front();
    if (status) fail(qp);
    return true;
}

void work(StubCq *cq) {
    uint64_t now = now_us(), next = 0;
    for (StubQp *qp : cq->qps) {
        while (!qp->sends.empty() && qp->sends.front().due_us <= now && execute(qp, qp->sends.front())) {
        }
        if (!qp->sends.empty()) next = now + 200;
        deliver(qp);
    }
    land(now);
    if (!under_way.empty()) next = now + 200;
    cq->channel->tick(next || !cq->done.empty());
}

int poll_cq(Cq *any, int count, Completion *completions) {
    Lock lock(mutex_);
    auto *cq = static_cast<StubCq *>(any);
    work(cq);
    int n = 0;
    for (; n < count && !cq->done.empty(); ++n) {
        completions[n] = cq->done.front();
        cq->done.pop_front();
    }
    return n;
}

int req_notify_cq(Cq *any, int) {
    Lock lock(mutex_);
    auto *cq = static_cast<StubCq *>(any);
    cq->channel->armed = true;
    work(cq);
    return 0;
}

int post_send(Qp *any, SendRequest *request, SendRequest **bad) {
    Lock lock(mutex_);
    auto *qp = static_cast<StubQp *>(any);
    static std::minstd_rand random;
    uint64_t delay = number("STUB_IBV_DELAY_US", 0);
    for (; request; request = request->next) {
        *bad = request;
        if (!qp->remote) return EINVAL;
        Request r{*request, {request->pieces, request->pieces + request->piece_count}, "", now_us()};
        if (delay) r.due_us += random() % delay;
        if (request->flags & kInline) {
            if (r.pieces[0].nbytes > qp->max_inline) return ENOMEM;
            r.inlined.assign(reinterpret_cast<char *>(r.pieces[0].addr), r.pieces[0].nbytes);
        }
        if (r.pieces[0].nbytes > number("STUB_IBV_MAX_MESSAGE", 1 << 30)) return EINVAL;
        if (qp->error) {
            complete(static_cast<StubCq *>(qp->send_cq), qp, request->wr_id, kFlushed, 0);
            continue;
        }
        qp->sends.push_back(std::move(r));
    }
    // Executed when the process polls, which the tick makes it do.
    auto *channel = static_cast<StubCq *>(qp->send_cq)->channel;
    if (!channel->ticking) channel->tick(true);
    return 0;
}

int post_recv(Qp *any, ReceiveRequest *request, ReceiveRequest **) {
    Lock lock(mutex_);
    auto *qp = static_cast<StubQp *>(any);
    for (; request; request = request->next) qp->receives.emplace_back(request->wr_id, request->pieces[0]);
    return 0;
}

std::vector<Device> &devices() {
    static std::vector<Device> all = [] {
        std::vector<Device> found;
        const char *text = getenv("STUB_IBV_DEVICES");
        std::string names = text ? text : "mlx5_0,mlx5_1";
        for (size_t at = 0; at < names.size();) {
            size_t end = std::min(names.find(',', at), names.size());
            found.push_back({names.substr(at, end - at), static_cast<int>(found.size())});
            at = end + 1;
        }
        return found;
    }();
    return all;
}

}  // namespace

extern "C" {

Device **ibv_get_device_list(int *count) {
    auto **list = new Device *[devices().size() + 1]();
    for (size_t i = 0; i < devices().size(); ++i) list[i] = &devices()[i];
    if (count) *count = static_cast<int>(devices().size());
    return list;
}
void ibv_free_device_list(Device **list) { delete[] list; }
const char *ibv_get_device_name(Device *device) { return device->name.c_str(); }

Context *ibv_open_device(Device *device) {
    if (number("STUB_IBV_FORBIDDEN", 0)) {
        errno = EACCES;
        return nullptr;
    }
    auto *context = new StubContext{};
    context->device = device;
    context->number = device->number;
    context->cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    context->async_fd = eventfd(0, EFD_CLOEXEC);
    context->ops.poll_cq = poll_cq;
    context->ops.req_notify_cq = req_notify_cq;
    context->ops.post_send = post_send;
    context->ops.post_recv = post_recv;
    return context;
}
int ibv_close_device(Context *context) {
    close(context->cmd_fd);
    close(context->async_fd);
    delete static_cast<StubContext *>(context);
    return 0;
}

int ibv_query_device(Context *, DeviceAttr *attr) {
    *attr = {};
    attr->max_qp_wr = 16384;
    attr->max_cqe = 1 << 20;
    return 0;
}
int ibv_query_port(Context *, uint8_t, PortAttr *attr) {
    *attr = {};
    attr->state = kPortActive;
    attr->active_mtu = attr->max_mtu = 5;
    while ((128u << attr->active_mtu) > number("STUB_IBV_MTU", 4096)) --attr->active_mtu;
    attr->max_message_nbytes = static_cast<uint32_t>(number("STUB_IBV_MAX_MESSAGE", 1 << 30));
    attr->link_layer = kEthernet;
    return 0;
}
int ibv_query_gid(Context *context, uint8_t, int, Gid *gid) {
    *gid = {};
    gid->raw[0] = 0xfd;
    gid->raw[1] = static_cast<uint8_t>(static_cast<StubContext *>(context)->number);
    int pid = getpid();
    std::memcpy(gid->raw + 8, &pid, sizeof pid);
    return 0;
}

Pd *ibv_alloc_pd(Context *context) { return new Pd{context}; }
int ibv_dealloc_pd(Pd *pd) {
    delete pd;
    return 0;
}

Mr *ibv_reg_mr(Pd *pd, void *addr, size_t length, int) {
    Lock lock(mutex_);
    if (registered_nbytes + length > number("STUB_IBV_MEMLOCK", ~0ull)) {
        errno = ENOMEM;
        return nullptr;
    }
    registered_nbytes += length;
    static uint32_t key = 1;
    ++key;
    return new Mr{pd->context, pd, addr, length, 0, key, key};
}
// Over the stub of a GPU, whose memory is a file that the CPU cannot reach at the address that a program has of it:
// the device can.
Mr *ibv_reg_dmabuf_mr(Pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
    size_t whole = (length + 4095) / 4096 * 4096;
    void *want = reinterpret_cast<void *>(iova);
    if (number("STUB_IBV_NO_DMABUF", 0)) {
        errno = EOPNOTSUPP;
        return nullptr;
    }
    if (mmap(want, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset)) == MAP_FAILED)
        return nullptr;
    return ibv_reg_mr(pd, want, length, access);
}
int ibv_dereg_mr(Mr *region) {
    Lock lock(mutex_);
    registered_nbytes -= region->length;
    delete region;
    return 0;
}

Channel *ibv_create_comp_channel(Context *context) {
    auto *channel = new StubChannel{};
    channel->context = context;
    channel->fd = epoll_create1(EPOLL_CLOEXEC);
    channel->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    epoll_event event{EPOLLIN, {}};
    epoll_ctl(channel->fd, EPOLL_CTL_ADD, channel->timer, &event);
    return channel;
}
int ibv_destroy_comp_channel(Channel *channel) {
    close(channel->fd);
    close(static_cast<StubChannel *>(channel)->timer);
    delete static_cast<StubChannel *>(channel);
    return 0;
}
Cq *ibv_create_cq(Context *context, int, void *, Channel *channel, int) {
    auto *cq = new StubCq{};
    cq->context = context;
    cq->channel = static_cast<StubChannel *>(channel);
    return cq;
}
int ibv_destroy_cq(Cq *cq) {
    delete static_cast<StubCq *>(cq);
    return 0;
}
int ibv_get_cq_event(Channel *any, Cq **, void **) {
    Lock lock(mutex_);
    auto *channel = static_cast<StubChannel *>(any);
    epoll_event event;
    if (!channel->armed || epoll_wait(channel->fd, &event, 1, 0) <= 0) {
        errno = EAGAIN;
        return -1;
    }
    channel->armed = false;
    return 0;
}
void ibv_ack_cq_events(Cq *, unsigned) {}

Qp *ibv_create_qp(Pd *pd, QpInit *init) {
    Lock lock(mutex_);
    if (init->cap.max_inline_nbytes > number("STUB_IBV_INLINE", 256)) {
        errno = EINVAL;
        return nullptr;
    }
    auto *qp = new StubQp{};
    qp->context = pd->context;
    qp->pd = pd;
    qp->send_cq = qp->recv_cq = init->send_cq;
    qp->max_inline = init->cap.max_inline_nbytes;
    qp->socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    std::random_device random;
    for (int error = -1; error < 0;) {
        qp->qp_num = 1 + random() % 0xfffffe;
        socklen_t length;
        sockaddr_un address = address_of(qp->qp_num, length);
        error = bind(qp->socket, reinterpret_cast<sockaddr *>(&address), length);
    }
    auto *cq = static_cast<StubCq *>(init->send_cq);
    cq->qps.push_back(qp);
    epoll_event event{EPOLLIN, {}};
    epoll_ctl(cq->channel->fd, EPOLL_CTL_ADD, qp->socket, &event);
    return qp;
}
int ibv_modify_qp(Qp *any, QpAttr *attr, int) {
    auto *qp = static_cast<StubQp *>(any);
    if (attr->state == kReadyToReceive) {
        std::memcpy(&qp->remote_pid, attr->address.route.destination.raw + 8, sizeof qp->remote_pid);
        if (number("STUB_IBV_UNREACHABLE", 0)) return ETIMEDOUT;
    }
    if (attr->state == kReadyToReceive) qp->remote = attr->remote_qp;
    return 0;
}
int ibv_destroy_qp(Qp *any) {
    Lock lock(mutex_);
    auto *qp = static_cast<StubQp *>(any);
    auto *cq = static_cast<StubCq *>(qp->send_cq);
    for (auto &each : cq->qps)
        if (each == qp) {
            each = cq->qps.back();
            cq->qps.pop_back();
            break;
        }
    close(qp->socket);
    delete qp;
    return 0;
}

int ibv_get_async_event(Context *any, Event *event) {
    Lock lock(mutex_);
    auto *context = static_cast<StubContext *>(any);
    if (context->events.empty()) {
        errno = EAGAIN;
        return -1;
    }
    uint64_t count;
    (void)!read(context->async_fd, &count, sizeof count);
    *event = context->events.front();
    context->events.pop_front();
    return 0;
}
void ibv_ack_async_event(Event *) {}

const char *ibv_wc_status_str(uint32_t status) {
    return status == kRetriesExceeded ? "transport retry counter exceeded" : status == kFlushed ? "Work Request Flushed Error" : "stub";
}
const char *ibv_event_type_str(uint32_t type) { return type == kDeviceFatal ? "local catastrophic error" : "stub event"; }
int ibv_fork_init() { return 0; }

}  // extern "C"
