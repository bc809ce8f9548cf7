// control: see control.h.
#include "control.h"

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

namespace hdma {

namespace {

enum : uint8_t { kAbort = 1, kBye = 2 };
constexpr size_t kMaxText = 8192;

void wake_up(int fd) {
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

}  // namespace

struct Control::Header {
    uint32_t length;
    uint8_t type, kind;
    uint16_t reserved;
    uint64_t calls;
};

Control::Control(std::vector<Part> parts, Calls &calls, Fault &fault) : calls_(calls), fault_(fault) {
    for (Part &part : parts) {
        links_.emplace_back();
        links_.back().rank = part.rank;
        links_.back().fd = std::move(part.fd);
        links_.back().name = std::move(part.name);
    }
    wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_.valid()) throw Error(Kind::Device, "eventfd: " + errno_text(errno));
    fault_.listen([this] { wake_up(wake_.get()); });
}

Control::~Control() { close(); }

void Control::start() {
    thread_.start("hdma-control", [this] { run(); });
}

void Control::close() {
    if (!thread_.started()) return;
    stop_.store(true);
    wake_up(wake_.get());
    thread_.join();
    if (fault_.raised())
        send_abort();
    else
        for (Link &link : links_) send(link, kBye, 0, calls_.begun(), "");
}

void Control::forget() {
    thread_.forget();
    for (Link &link : links_) link.fd.reset();
}

void Control::run() try {
    std::vector<pollfd> polled;
    while (!stop_.load()) {
        polled.assign(1, {wake_.get(), POLLIN, 0});
        for (Link &link : links_)
            if (link.fd.valid()) polled.push_back({link.fd.get(), POLLIN, 0});
        if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) {
            fault_.raise(Kind::Wire, "poll on the control links: " + errno_text(errno));
            return;
        }
        if (polled[0].revents) {
            uint64_t count;
            while (::read(wake_.get(), &count, sizeof count) < 0 && errno == EINTR) {
            }
        }
        size_t at = 1;
        for (Link &link : links_)
            if (at < polled.size() && link.fd.get() == polled[at].fd && polled[at++].revents) read(link);
        if (fault_.raised()) send_abort();
    }
} catch (const std::exception &error) {
    fault_.raise(Kind::Error, format("the control thread failed: %s", error.what()));
}

void Control::read(Link &link) {
    char chunk[4096];
    ssize_t n = recv(link.fd.get(), chunk, sizeof chunk, MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) {
        std::string reason = n == 0 ? "its control connection closed without a goodbye" : errno_text(errno);
        link.fd.reset();
        if (!link.bye)
            fault_.raise(Kind::Wire, link.name + " is gone: " + reason +
                                         " (the process was killed, crashed, or exited without close())");
        return;
    }
    link.buffer.append(chunk, n);
    Header header;
    while (link.buffer.size() >= sizeof header) {
        std::memcpy(&header, link.buffer.data(), sizeof header);
        if (header.length > kMaxText) {
            link.fd.reset();
            fault_.raise(Kind::Wire, link.name + " sent a garbled control message");
            return;
        }
        if (link.buffer.size() < sizeof header + header.length) return;
        std::string text = link.buffer.substr(sizeof header, header.length);
        link.buffer.erase(0, sizeof header + header.length);
        if (header.type == kBye) {
            link.bye = true;
            calls_.departed(link.rank, header.calls);
        } else if (header.type == kAbort) {
            link.bye = true;  // It will close, and the cause is known.
            fault_.raise(header.kind <= 4 ? static_cast<Kind>(header.kind) : Kind::Error, text);
        }
    }
}

void Control::send_abort() {
    if (abort_sent_) return;
    abort_sent_ = true;
    for (Link &link : links_) send(link, kAbort, static_cast<uint8_t>(fault_.kind()), calls_.begun(), fault_.text());
}

void Control::send(Link &link, uint8_t type, uint8_t kind, uint64_t calls, const std::string &text) {
    if (!link.fd.valid()) return;
    std::string body = text.substr(0, kMaxText);
    Header header{static_cast<uint32_t>(body.size()), type, kind, 0, calls};
    std::string message(reinterpret_cast<char *>(&header), sizeof header);
    message += body;
    // One message of at most a few kilobytes in the life of a link: it fits the socket's empty buffer whole.
    while (::send(link.fd.get(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno == EINTR) {
    }
}

}  // namespace hdma
