// wire/flusher: see flusher.h.
#include "flusher.h"

namespace hdma {

Flusher::Flusher(Nic &nic, int rank, const char *window, uint32_t rkey, ibv::Piece scratch)
    : nic_(nic), rank_(rank), window_(reinterpret_cast<uint64_t>(window)), rkey_(rkey), scratch_(scratch) {
    uint32_t no_inline = 0;
    qp_ = nic.make_qp(1, 1, no_inline);
    QpAddress own = nic.address_of(qp_, 0);
    nic.link(qp_, own, own, rank);
}

void Flusher::read() {
    if (held_.empty() || !covered_.empty()) return;
    covered_.swap(held_);
    ibv::SendRequest read{}, *bad;
    read.wr_id = kRequest;
    read.pieces = &scratch_;
    read.piece_count = 1;
    read.opcode = ibv::kRead;
    read.flags = ibv::kSignaled;
    read.remote = {window_, rkey_};
    if (int error = qp_->context->ops.post_send(qp_, &read, &bad))
        throw Error(Kind::Wire, format("rank %d cannot post a read of its window on %s: %s", rank_, nic_.name().c_str(),
                                       errno_text(error).c_str()));
}

void Flusher::completed(const ibv::Completion &completion, Wire::Sink &sink) {
    if (completion.status != ibv::kSuccess)
        throw Error(Kind::Wire, format("rank %d: a read of its window by %s failed: %s (status %u, vendor error 0x%x). Look at the "
                                       "kernel's log, or set HDMA_GPU_RDMA=off", rank_, nic_.name().c_str(),
                                       nic_.ibv().wc_status_str(completion.status), completion.status,
                                       completion.vendor_error));
    for (const Arrival &arrival : covered_) sink.arrived(arrival.flag, arrival.value);
    covered_.clear();
}

}  // namespace hdma
