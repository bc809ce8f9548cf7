// wire: what the proxy needs of a network. One implementation a file in wire/.
//
// Protocol: a put carries bytes into the window of a rail peer and then raises a flag there; the peer learns of it
// through its Sink. Every put names the call that it belongs to, so that a mismatch is found before the data is used.
//
//     proxy --post--> Wire ~~~~~~~~~~> Wire --announced, arrived--> Sink of the peer's proxy
//     Sink  <--sent-- (source may be reused)
//
// Threading: all calls come from the proxy's thread; sent_nbytes() from any.
//
// Ordering: arrived() is called after the payload was written to the window, in the order of the puts of one
// (peer, lane); sent() after the network has read the source.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../base.h"
#include "../plan.h"

namespace hdma {

struct Put {
    int peer;
    Lane lane;
    uint32_t flag, value;     // raised at the peer
    uint64_t offset;          // into the peer's window
    const char *src;
    uint64_t nbytes;          // 0: only the flag
    int32_t local_flag;       // raised here once src may be reused; -1: none
    uint32_t local_value;
    Fingerprint fingerprint;  // of the call
};

// What it throws names this rank.
class Wire {
  public:
    class Sink {
      public:
        virtual ~Sink() = default;
        // A put of this call has begun to arrive.
        virtual void announced(int peer, const Fingerprint &fingerprint) = 0;
        virtual void arrived(uint32_t flag, uint32_t value) = 0;
        virtual void sent(uint32_t local_flag, uint32_t value) = 0;
        // The connection is gone; `reason` says which and why. Not yet an error: the peer may have closed.
        virtual void lost(int peer, const std::string &reason) = 0;
        // Bytes that no peer of ours would send.
        virtual void garbled(int peer, const std::string &what) = 0;
    };

    virtual ~Wire() = default;
    // False where too many puts are outstanding: progress first.
    virtual bool post(const Put &put) = 0;
    // Moves what can be moved without blocking; true if anything was.
    virtual bool progress() = 0;
    // Readable when progress() has something to do.
    virtual int fd() const = 0;
    // Everything posted has left this machine's buffers.
    virtual bool drained() = 0;
    // Payload and headers.
    virtual uint64_t sent_nbytes() = 0;
    // In a forked child, before the destructor: what the network holds is the parent's.
    virtual void forget() {}
};

struct LinkPart {
    int peer;
    Lane lane;
    Fd fd;  // a connected socket that has passed the handshake
};

// This rank's window, which peers write, and how many flags the rank has.
struct Landing {
    char *window;
    uint64_t window_nbytes;
    uint32_t flag_count;
    // Of a window in memory of a GPU: its dma-buf, and whether it is seen to have landed only after a read from there.
    Fd dma_buf;
    bool flushes = false;
};

// TCP between rail peers (tcp.cc).
std::unique_ptr<Wire> tcp_wire(int rank, std::vector<LinkPart> parts, Landing landing, Wire::Sink &sink);

// Which RDMA device, and how its queue pairs are set up (hdma/nics/queue_pair.py).
struct NicChoice {
    std::string device;
    int port, gid_index;
    uint32_t mtu_nbytes;  // 0: the port's
    uint8_t service_level, traffic_class;
    uint8_t timeout, retries;  // of a queue pair: retries of 4.096 us x 2^timeout each
};

// RDMA writes between rail peers (verbs.cc); the sockets only carry the addresses of queue pairs. Throws Error(Wire)
// where the device cannot be used.
std::unique_ptr<Wire> verbs_wire(const NicChoice &choice, int rank, std::vector<LinkPart> parts, Landing landing,
                                 Wire::Sink &sink);
// Whether the device reaches a window in memory of a GPU; if not, throws Error(Wire) with the reason.
void try_dma_buf(const NicChoice &choice, int rank, const Landing &landing);

}  // namespace hdma
