// control: one socket to every node mate and rail peer, for what must arrive even when no data does.
//
// Protocol: two messages, and the end of the stream.
//
//     abort  the communicator has ended, why; the receiver raises its fault, and so forwards it to its own links
//     bye    the sender has closed after so many calls; its links may close without meaning a death
//     end of stream without bye: the process is gone
//
// Mates and rail peers reach every rank in two hops, so an abort reaches all.
//
// Threading: one thread reads and, told by the fault's listener through an eventfd, sends the abort. bye() comes from
// the thread that closes.
//
// Ordering: a rank sends its abort before it closes the link, so who learns of a cause at second hand learns the
// first cause, not the death of the messenger.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "calls.h"

namespace hdma {

class Control {
  public:
    struct Part {
        int rank;
        Fd fd;             // a connected stream socket that has passed the handshake
        std::string name;  // "rank 3 (pid 412 on node7)"
    };
    Control(std::vector<Part> parts, Calls &calls, Fault &fault);
    ~Control();
    void start();  // after every listener of the fault is there
    // Says goodbye, or the cause of the fault, and ends the thread.
    void close();
    // In a forked child: lets go of the links, which would otherwise hide the parent's death from its peers.
    void forget();

  private:
    struct Link {
        int rank;
        Fd fd;
        std::string name, buffer;
        bool bye = false;
    };
    struct Header;
    void run();
    void read(Link &link);
    void send(Link &link, uint8_t type, uint8_t kind, uint64_t calls, const std::string &text);
    void send_abort();

    std::vector<Link> links_;
    Calls &calls_;
    Fault &fault_;
    Fd wake_;
    std::atomic<bool> stop_{false};
    bool abort_sent_ = false;
    Thread thread_;
};

}  // namespace hdma
