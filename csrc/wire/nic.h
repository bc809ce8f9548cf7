// wire/nic: an RDMA device opened for one wire: its port, its completion queue, its queue pairs.
//
// Protocol: open, register memory, make queue pairs, link each to its counterpart, poll. All errors are Error(Wire) and
// say which device and port, the system's reason, and what can be done.
//
// Threading: one thread at a time.
//
// Ordering: see verbs.cc.
#pragma once

#include <memory>

#include "ibverbs.h"
#include "wire.h"

namespace hdma {

// What a queue pair's counterpart must know of it.
struct QpAddress {
    ibv::Gid gid;
    uint32_t qp_num, psn, mtu;  // the MTU as the number that libibverbs gives it
    uint16_t lid;
    uint8_t link_layer, reserved = 0;
};

class Nic {
  public:
    Nic(const NicChoice &choice, int rank);
    ~Nic();
    Nic(const Nic &) = delete;
    // Before the first queue pair: room for so many completions that nobody has polled.
    void make_queue(size_t completion_count);
    // In a forked child, where nothing may be asked of the device, which is the parent's: closes the descriptors.
    void forget();

    ibv::Mr *reg(void *addr, size_t nbytes, const std::string &what);
    ibv::Mr *reg_dma_buf(int fd, void *addr, size_t nbytes, const std::string &what);
    // Sets `inline_nbytes` to 0 where the device has not so much room for inline data.
    ibv::Qp *make_qp(uint32_t max_sends, uint32_t max_receives, uint32_t &inline_nbytes);
    QpAddress address_of(const ibv::Qp *qp, uint32_t psn) const;
    // `peer`: for errors.
    void link(ibv::Qp *qp, const QpAddress &own, const QpAddress &theirs, int peer);

    // How many there were, at most `count`.
    int poll(ibv::Completion *completions, int count);
    // Readable when something completes after this.
    void arm();
    // Takes notifications off queue_fd(); whether there were any.
    bool take_notifications();
    bool take_event(ibv::Event &event);
    bool port_active() const;
    int queue_fd() const { return channel_->fd; }
    int event_fd() const { return context_->async_fd; }

    // "rxe0 port 1 (GID 1, ::ffff:10.9.0.1)"
    const std::string &name() const { return name_; }
    const ibv::Functions &ibv() const { return ibv_; }
    size_t max_piece_nbytes() const { return max_piece_nbytes_; }
    uint32_t max_requests() const { return static_cast<uint32_t>(attr_.max_qp_wr); }

  private:
    void open();
    void check_port();
    void close();
    [[noreturn]] void fail(const std::string &what, int error, const std::string &remedy) const;

    NicChoice choice_;
    int rank_;
    const ibv::Functions &ibv_;
    std::string name_;
    ibv::Context *context_ = nullptr;
    ibv::Pd *pd_ = nullptr;
    ibv::Channel *channel_ = nullptr;
    ibv::Cq *cq_ = nullptr;
    ibv::DeviceAttr attr_{};
    ibv::PortAttr port_{};
    ibv::Gid gid_{};
    size_t max_piece_nbytes_ = 0;
    unsigned unacknowledged_ = 0;
    std::vector<ibv::Mr *> regions_;
    std::vector<ibv::Qp *> qps_;
};

// "fe80::1" or "::ffff:10.9.0.1"
std::string gid_text(const ibv::Gid &gid);

}  // namespace hdma
