// wire/verbs: puts by RDMA, over one reliable queue pair for each (rail peer, lane).
//
// Protocol: a put is its payload, written straight into the peer's window in pieces, then a message with the flag,
// posted together as one list. The queue pair is made when it is first needed: its address goes over the (peer, lane)'s
// socket, which stands since start-up, and nothing is posted before the peer has said that it is ready to receive. After
// that the socket carries nothing; its end tells that the peer's process has closed or died.
//
//     rank                                  rail peer
//     address of its queue pair  --socket-->  makes its own, links it
//     links it                  <--socket--   address, ready
//     ready                      --socket-->
//     write, write, .. message   ==RDMA===>   window; a receive of the flag ends in a completion
//     completion: source free
//
// Threading: see wire.h; one thread.
//
// Ordering: a reliable queue pair executes its requests in the order posted, and a receive completes after the writes
// posted before its message have been placed (InfiniBand Architecture Specification, volume 1, section 9.5, "Transaction
// ordering"; NCCL and UCX rely on it as well). Memory is registered without relaxed ordering, so that the bus keeps that
// order too. A send completes when the peer's device has acknowledged it and so all before it: then the source may be
// reused. Into memory of a GPU, writes may be under way on the bus when the completion is seen: see flusher.h.
#include <errno.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <optional>
#include <random>

#include "flusher.h"

namespace hdma {

namespace {

// Enough to keep a link busy with a put in the air and one being posted; few, so that a late put of a small chunk does
// not queue behind many large ones.
constexpr uint32_t kOutstanding = 8;
// Messages that a peer may be ahead of this rank's proxy before its device has to try again.
constexpr uint32_t kReceives = 64;
constexpr int kPolled = 32;
constexpr uint32_t kMagic = 0x68646d76;

struct Message {  // with each put
    uint32_t magic, flag, value, reserved;
    Fingerprint fingerprint;
};

struct Greeting {  // over the socket
    uint32_t magic, ready;
    QpAddress address;
    uint32_t rkey, reserved;
    uint64_t window, window_nbytes;
};

// Which request completed: its connection, and whether it was a receive into a slot (a failed completion says nothing
// else).
constexpr uint32_t kSent = ~0u;
uint64_t request_id(size_t connection, uint32_t slot) { return static_cast<uint64_t>(connection) << 32 | slot; }

// Shared, so that a fork does not copy it away from the device.
struct Mapping {
    char *at = nullptr;
    size_t nbytes = 0;
    ~Mapping() {
        if (at) munmap(at, nbytes);
    }
    void allocate(size_t wanted, int rank) {
        void *got = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (got == MAP_FAILED) throw Error(Kind::Wire, format("rank %d: no memory for the messages of its wire: %s", rank, errno_text(errno).c_str()));
        at = static_cast<char *>(got);
        nbytes = wanted;
    }
};

ibv::Mr *register_window(Nic &nic, const Landing &landing) {
    if (landing.dma_buf.valid())
        return nic.reg_dma_buf(landing.dma_buf.get(), landing.window, landing.window_nbytes, "its window");
    return nic.reg(landing.window, landing.window_nbytes, "its window");
}

class Verbs final : public Wire {
  public:
    Verbs(const NicChoice &choice, int rank, std::vector<LinkPart> parts, Landing landing, Sink &sink)
        : nic_(choice, rank), rank_(rank), landing_(std::move(landing)), sink_(sink), connections_(parts.size()) {
        size_t pieces = (landing_.window_nbytes + nic_.max_piece_nbytes() - 1) / nic_.max_piece_nbytes();
        if (pieces + 1 > nic_.max_requests())
            throw Error(Kind::Usage, format("rank %d: %s takes %u requests of %zu bytes, too few for a window of %llu bytes: set "
                                            "HDMA_WINDOW_BYTES lower", rank, nic_.name().c_str(), nic_.max_requests(),
                                            nic_.max_piece_nbytes(), static_cast<unsigned long long>(landing_.window_nbytes)));
        depth_ = static_cast<uint32_t>(std::min<size_t>(kOutstanding * (pieces + 1), nic_.max_requests()));
        requests_.resize(pieces + 1);
        pieces_.resize(pieces + 1);
        // Requests without a notice of their own complete too, once a queue pair fails.
        nic_.make_queue(connections_.size() * (depth_ + kReceives) + 1);
        epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
        if (!epoll_.valid()) throw Error(Kind::Wire, format("rank %d: epoll_create1: %s", rank, errno_text(errno).c_str()));
        for (size_t i = 0; i < parts.size(); ++i) {
            connections_[i].peer = parts[i].peer;
            connections_[i].lane = parts[i].lane;
            connections_[i].side = std::move(parts[i].fd);
            watch(connections_[i].side.get(), i);
        }
        watch(nic_.queue_fd(), kQueue);
        watch(nic_.event_fd(), kEvents);
    }

    bool post(const Put &put) override {
        Connection &c = find(put.peer, put.lane);
        if (c.lost) {  // The peer has closed, or its loss is being reported: nobody waits for this put.
            if (put.local_flag >= 0) sink_.sent(put.local_flag, put.local_value);
            return true;
        }
        if (c.queue.size() + c.sent.size() >= kOutstanding) return false;
        c.queue.push_back(put);
        if (!c.qp) greet(c);
        flush(c);
        return true;
    }

    bool progress() override {
        bool moved = poll();
        if (!moved && !armed_) {
            nic_.arm();
            armed_ = true;
            moved = poll();  // What completed before it was armed is not notified.
        }
        epoll_event events[64];
        int count = epoll_wait(epoll_.get(), events, 64, 0);
        for (int i = 0; i < count; ++i) {
            uint64_t what = events[i].data.u64;
            if (what == kQueue) {
                if (nic_.take_notifications()) armed_ = false;
            } else if (what == kEvents) {
                take_events();
            } else {
                read_side(connections_[what]);
            }
        }
        return moved || count > 0;
    }

    int fd() const override { return epoll_.get(); }

    bool drained() override {
        return std::all_of(connections_.begin(), connections_.end(),
                           [](const Connection &c) { return c.lost || (c.queue.empty() && c.sent.empty()); });
    }

    uint64_t sent_nbytes() override { return sent_nbytes_.load(std::memory_order_relaxed); }

    void forget() override { nic_.forget(); }

  private:
    static constexpr uint64_t kQueue = ~0ull, kEvents = ~1ull;

    struct Posted {
        uint32_t requests;
        int32_t local_flag;
        uint32_t local_value;
    };
    struct Connection {
        int peer;
        Lane lane;
        Fd side;
        bool lost = false, open = false;  // open: the peer is ready
        std::string flushed;              // why requests were flushed, where nothing else has told
        ibv::Qp *qp = nullptr;
        uint32_t psn = 0, inline_nbytes = sizeof(Message);
        Greeting theirs{};
        Greeting in;
        size_t in_done = 0;
        std::deque<Put> queue;    // not posted yet
        std::deque<Posted> sent;  // posted, not completed
        uint32_t requests = 0;    // that these are
        uint32_t next_slot = 0;
    };

    Connection &find(int peer, Lane lane) {
        for (Connection &c : connections_)
            if (c.peer == peer && c.lane == lane) return c;
        throw Error(Kind::Error, format("rank %d has no connection to rank %d", rank_, peer));
    }
    size_t index(const Connection &c) const { return static_cast<size_t>(&c - connections_.data()); }

    void watch(int fd, uint64_t what) {
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = what;
        if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) < 0)
            throw Error(Kind::Wire, format("rank %d: epoll_ctl: %s", rank_, errno_text(errno).c_str()));
    }

    // The window is there once a peer is to be reached; its pages are pinned from now on.
    void register_memory() {
        if (window_) return;
        messages_.allocate(connections_.size() * kSlots * sizeof(Message) + sizeof(uint64_t), rank_);
        message_region_ = nic_.reg(messages_.at, messages_.nbytes, "its messages");
        window_ = register_window(nic_, landing_);
        if (landing_.flushes)
            flusher_.emplace(nic_, rank_, landing_.window, window_->rkey,
                             ibv::Piece{reinterpret_cast<uint64_t>(messages_.at + messages_.nbytes - sizeof(uint64_t)),
                                        sizeof(uint64_t), message_region_->lkey});
    }

    static constexpr uint32_t kSlots = kReceives + kOutstanding;
    Message &slot(const Connection &c, uint32_t number) {
        return reinterpret_cast<Message *>(messages_.at)[index(c) * kSlots + number];
    }

    void make_qp(Connection &c) {
        register_memory();
        c.qp = nic_.make_qp(depth_, kReceives, c.inline_nbytes);
        c.psn = std::random_device()() & 0xffffff;
        for (uint32_t i = 0; i < kReceives; ++i) receive(c, i);
    }

    void receive(Connection &c, uint32_t number) {
        ibv::Piece piece{reinterpret_cast<uint64_t>(&slot(c, number)), sizeof(Message), message_region_->lkey};
        ibv::ReceiveRequest request{request_id(index(c), number), nullptr, &piece, 1}, *bad;
        if (int error = c.qp->context->ops.post_recv(c.qp, &request, &bad))
            throw Error(Kind::Wire, format("rank %d cannot post a receive for rank %d on %s: %s", rank_, c.peer,
                                           nic_.name().c_str(), errno_text(error).c_str()));
    }

    // Says where this rank's queue pair is and, once it is linked, that it is ready.
    void greet(Connection &c) {
        if (!c.qp) make_qp(c);
        Greeting greeting{};
        greeting.magic = kMagic;
        greeting.ready = c.theirs.magic != 0;
        greeting.address = nic_.address_of(c.qp, c.psn);
        greeting.rkey = window_->rkey;
        greeting.window = reinterpret_cast<uint64_t>(landing_.window);
        greeting.window_nbytes = landing_.window_nbytes;
        // Two of these are all that the socket ever carries one way, so they fit its buffer.
        ssize_t n = send(c.side.get(), &greeting, sizeof greeting, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n != sizeof greeting) lose(c, format("it cannot be greeted: %s", n < 0 ? errno_text(errno).c_str() : "short write"));
    }

    void read_side(Connection &c) {
        while (!c.lost) {
            ssize_t n = recv(c.side.get(), reinterpret_cast<char *>(&c.in) + c.in_done, sizeof c.in - c.in_done, MSG_DONTWAIT);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
            if (n <= 0) {
                while (poll()) {  // What it sent before it closed has arrived.
                }
                return lose(c, format("its connection ended: %s", n ? errno_text(errno).c_str() : "connection closed by peer"));
            }
            c.in_done += n;
            if (c.in_done < sizeof c.in) continue;
            c.in_done = 0;
            greeted(c, c.in);
        }
    }

    void greeted(Connection &c, const Greeting &theirs) {
        if (theirs.magic != kMagic || theirs.window_nbytes != landing_.window_nbytes) {
            sink_.garbled(c.peer, format("a greeting with magic %08x and a window of %llu bytes", theirs.magic,
                                         static_cast<unsigned long long>(theirs.window_nbytes)));
            return lose(c, "garbled greeting");
        }
        if (!c.theirs.magic) {
            c.theirs = theirs;
            if (!c.qp) make_qp(c);
            nic_.link(c.qp, nic_.address_of(c.qp, c.psn), theirs.address, c.peer);
            greet(c);
        }
        if (!theirs.ready || c.open) return;
        c.open = true;
        flush(c);
    }

    void flush(Connection &c) {
        while (c.open && !c.lost && !c.queue.empty()) {
            const Put &put = c.queue.front();
            auto pieces = static_cast<uint32_t>((put.nbytes + nic_.max_piece_nbytes() - 1) / nic_.max_piece_nbytes());
            if (c.requests + pieces + 1 > depth_) return;
            if (put.nbytes > c.theirs.window_nbytes || put.offset > c.theirs.window_nbytes - put.nbytes)
                throw Error(Kind::Error, format("rank %d: a put of %llu bytes at %llu lies outside the window of rank %d", rank_,
                                                static_cast<unsigned long long>(put.nbytes),
                                                static_cast<unsigned long long>(put.offset), c.peer));
            submit(c, put, pieces);
            c.sent.push_back({pieces + 1, put.local_flag, put.local_value});
            c.requests += pieces + 1;
            sent_nbytes_.fetch_add(put.nbytes + sizeof(Message), std::memory_order_relaxed);
            c.queue.pop_front();
        }
    }

    // One list: only the message at its end completes with a notice.
    void submit(Connection &c, const Put &put, uint32_t count) {
        for (uint32_t i = 0; i < count; ++i) {
            uint64_t at = i * nic_.max_piece_nbytes();
            auto nbytes = static_cast<uint32_t>(std::min<uint64_t>(nic_.max_piece_nbytes(), put.nbytes - at));
            pieces_[i] = {reinterpret_cast<uint64_t>(put.src) + at, nbytes, window_->lkey};
            ibv::SendRequest &write = requests_[i] = {};
            write.wr_id = request_id(index(c), kSent);
            write.next = &requests_[i + 1];
            write.pieces = &pieces_[i];
            write.piece_count = 1;
            write.opcode = ibv::kWrite;
            write.remote = {c.theirs.window + put.offset + at, c.theirs.rkey};
        }
        Message &message = slot(c, kReceives + c.next_slot);
        c.next_slot = (c.next_slot + 1) % kOutstanding;
        message = {kMagic, put.flag, put.value, 0, put.fingerprint};
        pieces_[count] = {reinterpret_cast<uint64_t>(&message), sizeof message, message_region_->lkey};
        ibv::SendRequest &last = requests_[count] = {};
        last.wr_id = request_id(index(c), kSent);
        last.pieces = &pieces_[count];
        last.piece_count = 1;
        last.opcode = ibv::kSend;
        last.flags = ibv::kSignaled | (c.inline_nbytes ? ibv::kInline : 0);
        ibv::SendRequest *bad;
        if (int error = c.qp->context->ops.post_send(c.qp, &requests_[0], &bad))
            throw Error(Kind::Wire, format("rank %d cannot post a put to rank %d on %s: %s", rank_, c.peer, nic_.name().c_str(),
                                           errno_text(error).c_str()));
    }

    bool poll() {
        ibv::Completion completions[kPolled];
        int count = nic_.poll(completions, kPolled);
        for (int i = 0; i < count; ++i) completed(completions[i]);
        if (flusher_) flusher_->read();
        if (count == 0)
            for (Connection &c : connections_)
                if (!c.flushed.empty()) lose(c, c.flushed);
        return count > 0;
    }

    void completed(const ibv::Completion &completion) {
        if (completion.wr_id == Flusher::kRequest) return flusher_->completed(completion, sink_);
        Connection &c = connections_[completion.wr_id >> 32];
        auto number = static_cast<uint32_t>(completion.wr_id);
        if (completion.status == ibv::kFlushed) {
            // A consequence: its cause, if it completes at all, may come a little later.
            if (!c.lost && c.flushed.empty()) c.flushed = failure(c, completion);
        } else if (completion.status != ibv::kSuccess) {
            lose(c, failure(c, completion));
        } else if (number != kSent) {
            received(c, number);
        } else if (!c.lost) {
            Posted done = c.sent.front();
            c.sent.pop_front();
            c.requests -= done.requests;
            if (done.local_flag >= 0) sink_.sent(done.local_flag, done.local_value);
            flush(c);
        }
    }

    void received(Connection &c, uint32_t number) {
        const Message &message = slot(c, number);
        if (message.magic != kMagic || message.flag >= landing_.flag_count) {
            sink_.garbled(c.peer, format("a message with magic %08x, flag %u", message.magic, message.flag));
            return lose(c, "garbled message");
        }
        sink_.announced(c.peer, message.fingerprint);
        if (flusher_)
            flusher_->hold(message.flag, message.value);
        else
            sink_.arrived(message.flag, message.value);
        if (!c.lost) receive(c, number);
    }

    void lose(Connection &c, const std::string &reason) {
        if (c.lost) return;
        c.lost = true;
        epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, c.side.get(), nullptr);
        for (const Put &put : c.queue)
            if (put.local_flag >= 0) sink_.sent(put.local_flag, put.local_value);
        for (const Posted &posted : c.sent)
            if (posted.local_flag >= 0) sink_.sent(posted.local_flag, posted.local_value);
        c.queue.clear();
        c.sent.clear();
        c.flushed.clear();
        sink_.lost(c.peer, reason);
    }

    std::string failure(const Connection &c, const ibv::Completion &completion) {
        std::string what = format("%s on %s towards %s failed: %s (status %u, vendor error 0x%x)",
                                  static_cast<uint32_t>(completion.wr_id) != kSent ? "a receive" : "an RDMA write", nic_.name().c_str(),
                                  gid_text(c.theirs.address.gid).c_str(), nic_.ibv().wc_status_str(completion.status),
                                  completion.status, completion.vendor_error);
        if (!nic_.port_active()) return what + ". The port is not active any more: look at its link (rdma link; ip link)";
        switch (completion.status) {
            case ibv::kRetriesExceeded:
                return what + ". Nothing came back: look at both links and at the way between them (rdma link; ping; the MTU "
                              "on the way: HDMA_MTU; HDMA_GID_INDEX); HDMA_QP_TIMEOUT and HDMA_QP_RETRIES say how long to try";
            case ibv::kRemoteAccess: return what + ". The peer's device refused the memory: its window is gone";
            default: return what + ". Look at both links (rdma link; ip link), at the kernel's log, and at the peer";
        }
    }

    void take_events() {
        ibv::Event event;
        while (nic_.take_event(event)) {
            std::string name = nic_.ibv().event_type_str(event.type);
            uint32_t type = event.type;
            ibv::Qp *qp = type == ibv::kQpFatal || type == ibv::kQpRequestError || type == ibv::kQpAccessError ? event.qp : nullptr;
            nic_.ibv().ack_async_event(&event);
            for (Connection &c : connections_)
                if (qp && c.qp == qp)
                    lose(c, format("a queue pair on %s failed: %s. Look at the kernel's log", nic_.name().c_str(), name.c_str()));
            // Of a port that goes down its queue pairs tell, unless it comes back before they give up.
            if (type == ibv::kDeviceFatal || type == ibv::kCqError)
                throw Error(Kind::Wire, format("rank %d: %s failed: %s. Look at the kernel's log", rank_, nic_.name().c_str(),
                                               name.c_str()));
        }
    }

    Mapping messages_;
    Nic nic_;
    int rank_;
    Landing landing_;
    Sink &sink_;
    std::vector<Connection> connections_;
    Fd epoll_;
    uint32_t depth_ = 0;
    bool armed_ = false;
    ibv::Mr *window_ = nullptr, *message_region_ = nullptr;
    std::optional<Flusher> flusher_;  // of a window in memory of a GPU
    std::vector<ibv::SendRequest> requests_;
    std::vector<ibv::Piece> pieces_;
    std::atomic<uint64_t> sent_nbytes_{0};
};

}  // namespace

std::unique_ptr<Wire> verbs_wire(const NicChoice &choice, int rank, std::vector<LinkPart> parts, Landing landing,
                                 Wire::Sink &sink) {
    return std::make_unique<Verbs>(choice, rank, std::move(parts), std::move(landing), sink);
}

void try_dma_buf(const NicChoice &choice, int rank, const Landing &landing) {
    Nic nic(choice, rank);
    register_window(nic, landing);
}

}  // namespace hdma
