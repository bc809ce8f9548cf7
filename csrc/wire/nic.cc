// wire/nic: see nic.h.
#include "nic.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace hdma {

namespace {

// No device takes more in a message, and some less.
constexpr size_t kMaxPieceNbytes = 1 << 30;
// After this long a sender tries again to which the receiver had no room: 0.64 ms (IBTA, RNR NAK timer field).
constexpr uint8_t kRnrTimer = 12;
// For ever: room comes when the peer's proxy runs, and the waits have their own deadlines.
constexpr uint8_t kRnrRetries = 7;
constexpr uint8_t kHops = 64;
// Events taken at most before they are acknowledged, which takes a lock.
constexpr unsigned kAcknowledge = 64;

uint32_t mtu_nbytes(uint32_t number) { return 128u << number; }

void set_nonblocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

std::string limit_text() {
    rlimit limit{};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) || limit.rlim_cur == RLIM_INFINITY) return "The machine is short of memory";
    return format("This process may lock %llu bytes",
                  static_cast<unsigned long long>(limit.rlim_cur));
}

}  // namespace

std::string gid_text(const ibv::Gid &gid) {
    char text[INET6_ADDRSTRLEN] = "?";
    inet_ntop(AF_INET6, gid.raw, text, sizeof text);
    return text;
}

Nic::Nic(const NicChoice &choice, int rank) : choice_(choice), rank_(rank), ibv_(ibv::load()) {
    name_ = format("%s port %d", choice_.device.c_str(), choice_.port);
    try {
        open();
        check_port();
    } catch (...) {
        close();
        throw;
    }
}

Nic::~Nic() { close(); }

void Nic::close() {
    if (!context_) return;
    for (ibv::Qp *qp : qps_) ibv_.destroy_qp(qp);
    if (cq_) {
        ibv_.ack_cq_events(cq_, unacknowledged_);
        ibv_.destroy_cq(cq_);
    }
    if (channel_) ibv_.destroy_comp_channel(channel_);
    for (ibv::Mr *region : regions_) ibv_.dereg_mr(region);
    if (pd_) ibv_.dealloc_pd(pd_);
    ibv_.close_device(context_);
    context_ = nullptr;
}

void Nic::forget() {
    if (!context_) return;
    if (channel_) ::close(channel_->fd);
    ::close(context_->async_fd);
    ::close(context_->cmd_fd);
    context_ = nullptr;
}

void Nic::fail(const std::string &what, int error, const std::string &remedy) const {
    throw Error(Kind::Wire, format("rank %d cannot %s on %s: %s. %s", rank_, what.c_str(), name_.c_str(),
                                   errno_text(error).c_str(), remedy.c_str()));
}

void Nic::open() {
    int count = 0;
    ibv::Device **devices = ibv_.get_device_list(&count);
    std::string others;
    for (int i = 0; i < count; ++i) {
        const char *name = ibv_.get_device_name(devices[i]);
        if (choice_.device == name) {
            context_ = ibv_.open_device(devices[i]);
            if (!context_) {
                int error = errno;
                ibv_.free_device_list(devices);
                fail("open its RDMA device", error, "Its user needs to read and write /dev/infiniband/uverbs*: give it the "
                     "device's group, or the container the device; or set HDMA_WIRE=tcp");
            }
            break;
        }
        others += (others.empty() ? "" : ", ") + std::string(name);
    }
    if (devices) ibv_.free_device_list(devices);
    if (!context_)
        throw Error(Kind::Wire, format("rank %d: libibverbs knows no device %s, only: %s. Its driver's part of rdma-core may be "
                                       "missing (ibverbs-providers), or /dev/infiniband is not in this container",
                                       rank_, choice_.device.c_str(), others.empty() ? "none" : others.c_str()));
    set_nonblocking(context_->async_fd);
    int error = ibv_.query_device(context_, &attr_);
    if (!error) error = ibv_.query_port(context_, static_cast<uint8_t>(choice_.port), &port_);
    if (error) fail("query its RDMA device", error, "Look at the kernel's log");
    if (ibv_.query_gid(context_, static_cast<uint8_t>(choice_.port), choice_.gid_index, &gid_))
        fail(format("read GID %d", choice_.gid_index), errno, "python -m hdma.info lists the GIDs; HDMA_GID_INDEX chooses one");
    name_ += format(" (GID %d, %s)", choice_.gid_index, gid_text(gid_).c_str());
    pd_ = ibv_.alloc_pd(context_);
    if (!pd_) fail("allocate a protection domain", errno, "Other processes may hold all that the device has");
    channel_ = ibv_.create_comp_channel(context_);
    if (!channel_) fail("make a completion channel", errno, "Look at the limit of open files: ulimit -n");
    set_nonblocking(channel_->fd);
    max_piece_nbytes_ = std::min<size_t>(port_.max_message_nbytes, kMaxPieceNbytes);
}

void Nic::check_port() {
    if (port_.state != ibv::kPortActive)
        throw Error(Kind::Wire, format("rank %d: %s is not active: look at the link (rdma link), choose another port "
                                       "(HDMA_NIC), or set HDMA_WIRE=tcp", rank_, name_.c_str()));
    uint32_t active = mtu_nbytes(port_.active_mtu);
    if (choice_.mtu_nbytes > active)
        throw Error(Kind::Usage, format("rank %d: HDMA_MTU=%u is more than the %u bytes that %s carries: lower it, or raise the "
                                        "MTU of its network interface", rank_, choice_.mtu_nbytes, active, name_.c_str()));
    // Each number is twice the MTU of the one before.
    while (choice_.mtu_nbytes && mtu_nbytes(port_.active_mtu) > choice_.mtu_nbytes) --port_.active_mtu;
}

void Nic::make_queue(size_t completion_count) {
    if (completion_count > static_cast<size_t>(attr_.max_cqe))
        throw Error(Kind::Wire, format("rank %d needs a queue of %zu completions, but %s has at most %d: too many nodes for one "
                                       "device", rank_, completion_count, name_.c_str(), attr_.max_cqe));
    cq_ = ibv_.create_cq(context_, static_cast<int>(completion_count), nullptr, channel_, 0);
    if (!cq_) fail(format("make a queue of %zu completions", completion_count), errno, limit_text());
}

ibv::Mr *Nic::reg(void *addr, size_t nbytes, const std::string &what) {
    // Without relaxed ordering: what a peer writes last arrives last.
    ibv::Mr *region = ibv_.reg_mr(pd_, addr, nbytes, ibv::kLocalWrite | ibv::kRemoteWrite);
    if (!region)
        fail(format("register %s (%zu bytes)", what.c_str(), nbytes), errno,
             limit_text() + ": raise the limit (ulimit -l unlimited; LimitMEMLOCK=infinity for a service, --ulimit memlock=-1 "
             "for a container), or take less (HDMA_WINDOW_BYTES), or set HDMA_WIRE=tcp");
    regions_.push_back(region);
    return region;
}

ibv::Mr *Nic::reg_dma_buf(int fd, void *addr, size_t nbytes, const std::string &what) {
    if (!ibv_.reg_dmabuf_mr)
        throw Error(Kind::Wire, format("rank %d: libibverbs has no ibv_reg_dmabuf_mr: update rdma-core (34 or later)", rank_));
    ibv::Mr *region = ibv_.reg_dmabuf_mr(pd_, 0, nbytes, reinterpret_cast<uint64_t>(addr), fd,
                                         ibv::kLocalWrite | ibv::kRemoteWrite | ibv::kRemoteRead);
    if (!region)
        fail(format("register %s (%zu bytes of GPU memory)", what.c_str(), nbytes), errno,
             "Its driver, or the kernel, takes no dma-buf of this GPU");
    regions_.push_back(region);
    return region;
}

ibv::Qp *Nic::make_qp(uint32_t max_sends, uint32_t max_receives, uint32_t &inline_nbytes) {
    ibv::QpInit init{};
    init.send_cq = init.recv_cq = cq_;
    init.type = ibv::kReliable;
    init.cap = {max_sends, max_receives, 1, 1, inline_nbytes};
    ibv::Qp *qp = ibv_.create_qp(pd_, &init);
    if (!qp && inline_nbytes) {
        inline_nbytes = 0;
        init.cap = {max_sends, max_receives, 1, 1, 0};
        qp = ibv_.create_qp(pd_, &init);
    }
    if (!qp) fail(format("make a queue pair of %u sends and %u receives", max_sends, max_receives), errno, limit_text());
    qps_.push_back(qp);
    ibv::QpAttr attr{};
    attr.state = ibv::kInit;
    attr.port = static_cast<uint8_t>(choice_.port);
    attr.access = ibv::kRemoteWrite | ibv::kRemoteRead;
    if (int error = ibv_.modify_qp(qp, &attr, ibv::kSetState | ibv::kSetPkey | ibv::kSetPort | ibv::kSetAccess))
        fail("prepare a queue pair", error, "Look at the kernel's log");
    return qp;
}

QpAddress Nic::address_of(const ibv::Qp *qp, uint32_t psn) const {
    return {gid_, qp->qp_num, psn, port_.active_mtu, port_.lid, port_.link_layer};
}

void Nic::link(ibv::Qp *qp, const QpAddress &own, const QpAddress &theirs, int peer) {
    if (own.link_layer != theirs.link_layer)
        throw Error(Kind::Wire, format("rank %d has %s, but rank %d a port of another kind of network (InfiniBand against "
                                       "Ethernet): choose ports of one network with HDMA_NIC", rank_, name_.c_str(), peer));
    ibv::QpAttr attr{};
    attr.state = ibv::kReadyToReceive;
    attr.path_mtu = std::min(own.mtu, theirs.mtu);
    attr.remote_qp = theirs.qp_num;
    attr.receive_psn = theirs.psn;
    attr.max_reads_served = 1;
    attr.min_rnr_timer = kRnrTimer;
    attr.address.port = static_cast<uint8_t>(choice_.port);
    attr.address.service_level = choice_.service_level;
    attr.address.lid = theirs.lid;
    // Ethernet has no other addresses than GIDs; InfiniBand within a subnet needs none.
    attr.address.is_global = own.link_layer == ibv::kEthernet;
    attr.address.route.destination = theirs.gid;
    attr.address.route.gid_index = static_cast<uint8_t>(choice_.gid_index);
    attr.address.route.hop_limit = kHops;
    attr.address.route.traffic_class = choice_.traffic_class;
    int error = ibv_.modify_qp(qp, &attr, ibv::kSetState | ibv::kSetAddress | ibv::kSetMtu | ibv::kSetRemoteQp |
                                              ibv::kSetReceivePsn | ibv::kSetMaxReadsServed | ibv::kSetMinRnrTimer);
    if (!error) {
        attr.state = ibv::kReadyToSend;
        attr.timeout = choice_.timeout;
        attr.retries = choice_.retries;
        attr.rnr_retries = kRnrRetries;
        attr.send_psn = own.psn;
        attr.max_reads = 1;
        error = ibv_.modify_qp(qp, &attr, ibv::kSetState | ibv::kSetTimeout | ibv::kSetRetries | ibv::kSetRnrRetries |
                                              ibv::kSetSendPsn | ibv::kSetMaxReads);
    }
    if (error)
        fail(format("link a queue pair to rank %d at %s", peer, gid_text(theirs.gid).c_str()), error,
             "Neither finds the other: are both addresses of one network (ping), both GIDs of one kind (HDMA_GID_INDEX), "
             "both ports on one fabric (HDMA_NIC)?");
}

bool Nic::port_active() const {
    ibv::PortAttr now{};
    return ibv_.query_port(context_, static_cast<uint8_t>(choice_.port), &now) == 0 && now.state == ibv::kPortActive;
}

int Nic::poll(ibv::Completion *completions, int count) {
    int got = context_->ops.poll_cq(cq_, count, completions);
    if (got < 0) throw Error(Kind::Wire, format("rank %d cannot poll the completions of %s", rank_, name_.c_str()));
    return got;
}

void Nic::arm() {
    if (int error = context_->ops.req_notify_cq(cq_, 0)) fail("ask for notifications", error, "Look at the kernel's log");
}

bool Nic::take_notifications() {
    ibv::Cq *cq;
    void *context;
    bool any = false;
    while (ibv_.get_cq_event(channel_, &cq, &context) == 0) {
        any = true;
        if (++unacknowledged_ == kAcknowledge) {
            ibv_.ack_cq_events(cq_, unacknowledged_);
            unacknowledged_ = 0;
        }
    }
    return any;
}

bool Nic::take_event(ibv::Event &event) { return ibv_.get_async_event(context_, &event) == 0; }

}  // namespace hdma
