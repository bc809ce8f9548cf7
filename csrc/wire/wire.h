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

class Wire {
  public:
    class Sink {
      public:
        virtual ~Sink() = default;
        // A put of this call has begun to arrive.
        virtual void announced(int peer, const Fingerprint &fingerprint) = 0;
        virtual void arrived(uint32_t flag, uint32_t value) = 0;
        virtual void sent(uint32_t local_flag, uint32_t value) = 0;
        // The connection is gone; `reason` in the system's words. Not yet an error: the peer may have closed.
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
    // As the network counts them, headers included.
    virtual uint64_t sent_nbytes() = 0;
};

struct TcpPart {
    int peer;
    Lane lane;
    Fd fd;  // a connected socket that has passed the handshake
};

// TCP between rail peers (tcp.cc). `window` is this rank's, `flag_count` how many flags it has.
std::unique_ptr<Wire> tcp_wire(std::vector<TcpPart> parts, char *window, uint64_t window_nbytes,
                               uint32_t flag_count, Wire::Sink &sink);

}  // namespace hdma
