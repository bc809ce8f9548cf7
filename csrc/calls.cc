// calls: see calls.h.
#include "calls.h"

#include <algorithm>

namespace hdma {

namespace {

Board::Record &record_of(const Shared &boards, int rank, uint64_t call) {
    return boards.board(rank).records[(call - 1) % kRecords];
}

}  // namespace

Calls::Calls(int rank, int size, Fault &fault)
    : rank_(rank), fault_(fault), heard_(size), last_heard_(size), departed_(size) {
    for (auto &calls : departed_) calls.store(kHere);
}

void Calls::add(std::shared_ptr<Shared> boards) {
    std::lock_guard<std::mutex> lock(mutex_);
    boards_.push_back(std::move(boards));
}

void Calls::remove(const std::shared_ptr<Shared> &boards) {
    std::lock_guard<std::mutex> lock(mutex_);
    boards_.erase(std::remove(boards_.begin(), boards_.end(), boards), boards_.end());
}

Fingerprint Calls::number(const CallText &text) {
    std::lock_guard<std::mutex> lock(mutex_);
    fault_.check();
    mine_.follow(text);
    ++mine_.call;
    begun_.store(mine_.call, std::memory_order_release);
    for (size_t peer = 0; peer < departed_.size(); ++peer)
        if (uint64_t calls = departed_[peer].load(); calls < mine_.call) missed(static_cast<int>(peer), calls);
    return mine_;
}

void Calls::announce(const Fingerprint &mine, const void *input, Shared &boards) {
    std::lock_guard<std::mutex> lock(mutex_);
    fault_.check();
    Board &own = boards.board(rank_);
    record_of(boards, rank_, mine.call).write(mine, reinterpret_cast<uintptr_t>(input));
    if (own.latest_call.load(std::memory_order_relaxed) < mine.call)
        own.latest_call.store(mine.call, std::memory_order_seq_cst);

    for (size_t peer = 0; peer < heard_.size(); ++peer) {
        int p = static_cast<int>(peer);
        for (auto &each : boards_) {
            if (p == rank_ || !each->has(p)) continue;
            Fingerprint theirs;
            if (record_of(*each, p, mine.call).read(mine.call, theirs)) compare(mine, p, theirs);
        }
        auto &heard = heard_[peer];
        if (auto found = heard.find(mine.call); found != heard.end()) {
            compare(mine, p, found->second);
            heard.erase(found);
        }
    }
    fault_.check();
}

void Calls::heard(int peer, const Fingerprint &theirs) {
    std::lock_guard<std::mutex> lock(mutex_);
    last_heard_[peer] = theirs;
    bool announced = false;
    for (auto &each : boards_) {
        const Board::Record &mine = record_of(*each, rank_, theirs.call);
        uint64_t call = mine.call.load(std::memory_order_relaxed);
        announced |= call >= theirs.call;
        if (call == theirs.call) compare(mine.fingerprint, peer, theirs);
    }
    if (!announced) heard_[peer].emplace(theirs.call, theirs);
}

void Calls::departed(int peer, uint64_t calls) {
    std::lock_guard<std::mutex> lock(mutex_);
    departed_[peer].store(calls, std::memory_order_release);
    if (calls < mine_.call) missed(peer, calls);
}

void Calls::compare(const Fingerprint &mine, int peer, const Fingerprint &theirs) {
    if (mine.hash == theirs.hash) return;
    auto call = static_cast<unsigned long long>(mine.call);
    std::string what = std::string(mine.text) != theirs.text
                           ? format("rank %d called %s, but rank %d called %s", rank_, mine.text, peer, theirs.text)
                           : format("rank %d and rank %d both called %s, but made different calls before it", rank_,
                                    peer, mine.text);
    fault_.raise(Kind::Usage, format("the ranks disagree on call %llu of their communicator: %s. All ranks must make "
                                     "the same calls, with the same sizes and dtypes, in the same order",
                                     call, what.c_str()));
}

void Calls::missed(int peer, uint64_t calls) {
    fault_.raise(Kind::Usage,
                 format("rank %d closed its communicator after %llu calls, but rank %d made call %llu, %s", peer,
                        static_cast<unsigned long long>(calls), rank_, static_cast<unsigned long long>(mine_.call),
                        mine_.text));
}

std::string Calls::whereabouts() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::string all;
    for (size_t peer = 0; peer < heard_.size(); ++peer) {
        int p = static_cast<int>(peer);
        if (p == rank_) continue;
        Fingerprint last = last_heard_[peer];
        if (!boards_.empty() && boards_.front()->has(p)) {
            last.call = 0;
            for (auto &each : boards_) {
                uint64_t call = each->board(p).latest_call.load(std::memory_order_acquire);
                Fingerprint found;
                if (call > last.call && record_of(*each, p, call).read(call, found)) last = found;
            }
        } else if (!last.call && heard_.size() > 64) {
            continue;  // a large communicator: name only ranks that were heard of
        }
        if (!all.empty()) all += "; ";
        all += last.call ? format("rank %d was last in call %llu, %s", p, static_cast<unsigned long long>(last.call), last.text)
                         : format("rank %d was not heard of in any call", p);
    }
    return all;
}

}  // namespace hdma
