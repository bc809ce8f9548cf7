// ticket: see ticket.h.
#include "ticket.h"

#include <algorithm>
#include <chrono>

namespace hdma {

namespace {

template <class Condition>
bool wait_until(std::condition_variable &changed, std::unique_lock<std::mutex> &lock, int64_t deadline_ns,
                Condition condition) {
    while (!condition()) {
        int64_t left = deadline_ns - now_ns();
        if (left <= 0) return false;
        changed.wait_for(lock, std::chrono::nanoseconds(std::min<int64_t>(left, 100 * 1000 * 1000)));
    }
    return true;
}

}  // namespace

bool Ticket::wait(int64_t deadline_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!wait_until(changed_, lock, deadline_ns, [&] { return done_; })) return false;
    if (error_) throw Error(*error_);
    check();
    return true;
}

void Ticket::order(CallerStream stream) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!device_) return;  // It has been executed.
    auto device = device_;
    auto ties = ties_;
    Moment left[] = {left_[0], left_[1]};
    lock.unlock();
    ties->told([&] {
        for (const Moment &moment : left) device->order(stream, moment);
    });
}

// With its results: streams that were released after a fault come to their ends too. So the fault is asked last.
bool Ticket::executed() {
    if (!executed_ && device_)
        executed_ = done_ && device_->passed(left_[0]) && device_->passed(left_[1]) &&
                    !(device_->streams() && ties_->fault.raised());
    return executed_;
}

// The fault, unless the results were there before it. Without one the driver is not asked, which takes time.
void Ticket::check() {
    if (ties_ && ties_->fault.raised() && !executed()) ties_->fault.check();
}

bool Ticket::done() try {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ && (error_ || executed() || ties_->fault.raised());
} catch (const Error &) {
    return true;  // The GPU has failed; error() says so.
}

std::optional<Error> Ticket::error() try {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_ || executed() || !ties_->fault.raised()) return error_;
    return Error(ties_->fault.kind(), ties_->fault.text());
} catch (const Error &error) {
    return error;
}

bool Ticket::wait_given(uint32_t mark, CallerStream stream, int64_t deadline_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!wait_until(changed_, lock, deadline_ns, [&] { return done_ || given_.at(mark).there; })) return false;
    if (error_) throw Error(*error_);
    check();
    if (!device_) return true;
    auto device = device_;
    auto ties = ties_;
    Moment given = given_.at(mark).moment;
    lock.unlock();
    ties->told([&] { device->order(stream, given); });
    return true;
}

void Ticket::settle() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!device_) return;
    try {
        executed();
    } catch (const Error &error) {
        error_ = error;
    }
    if (!executed_ && !error_ && ties_->fault.raised()) error_ = Error(ties_->fault.kind(), ties_->fault.text());
    executed_ = !error_;
    device_.reset();
    ties_.reset();
    for (auto *marks : {&pushed_, &given_})
        for (Mark &mark : *marks) mark.moment.reset();
    for (Moment &left : left_) left.reset();
}

void Ticket::push(uint32_t mark, Moment moment) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_) throw Error(*error_);
    pushed_.at(mark) = {true, std::move(moment)};
    changed_.notify_all();
}

bool Ticket::pushed(uint32_t mark, Moment &moment) {
    std::lock_guard<std::mutex> lock(mutex_);
    moment = pushed_[mark].moment;
    return pushed_[mark].there;
}

bool Ticket::all_pushed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ || std::all_of(pushed_.begin(), pushed_.end(), [](const Mark &mark) { return mark.there; });
}

Ticket::Pushed Ticket::wait_pushed(uint32_t mark, int64_t deadline_ns, const std::atomic<bool> &closing, Moment &moment) {
    std::unique_lock<std::mutex> lock(mutex_);
    wait_until(changed_, lock, deadline_ns,
               [&] { return pushed_[mark].there || ties_->fault.raised() || closing.load(); });
    moment = pushed_[mark].moment;
    return pushed_[mark].there ? Pushed::Yes : closing.load() ? Pushed::Never : Pushed::Late;
}

void Ticket::give(uint32_t mark, Moment moment) {
    std::lock_guard<std::mutex> lock(mutex_);
    given_[mark] = {true, std::move(moment)};
    changed_.notify_all();
}

void Ticket::leave(Lane lane, Moment moment) {
    std::lock_guard<std::mutex> lock(mutex_);
    left_[lane == Lane::Rail] = std::move(moment);
}

void Ticket::complete(std::optional<Error> error) {
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    error_ = std::move(error);
    changed_.notify_all();
}

}  // namespace hdma
