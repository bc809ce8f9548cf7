// calls: see calls.h.
#include "calls.h"

namespace hdma {

Calls::Calls(int rank, int size, Shared &shared, Fault &fault)
    : rank_(rank), shared_(shared), fault_(fault), heard_(size), last_heard_(size), departed_(size) {
    for (auto &calls : departed_) calls.store(kHere);
}

Fingerprint Calls::begin(const CallText &text, const void *input) {
    std::lock_guard<std::mutex> lock(mutex_);
    fault_.check();
    mine_.follow(text);
    uint64_t call = mine_.call++;
    begun_.store(mine_.call, std::memory_order_release);

    Board &own = shared_.board(rank_);
    Board::Record &record = own.records[call % kRecords];
    record.fingerprint = mine_;
    record.input = reinterpret_cast<uintptr_t>(input);
    record.call.store(mine_.call, std::memory_order_seq_cst);
    own.latest_call.store(mine_.call, std::memory_order_seq_cst);

    for (size_t peer = 0; peer < heard_.size(); ++peer) {
        int p = static_cast<int>(peer);
        if (p != rank_ && shared_.has(p)) {
            Board::Record &theirs = shared_.board(p).records[call % kRecords];
            if (theirs.call.load(std::memory_order_seq_cst) == mine_.call) compare(mine_, p, theirs.fingerprint);
        }
        auto &heard = heard_[peer];
        if (auto found = heard.find(mine_.call); found != heard.end()) {
            compare(mine_, p, found->second);
            heard.erase(heard.begin(), ++found);
        }
        if (uint64_t calls = departed_[peer].load(); calls < mine_.call) missed(p, calls);
    }
    fault_.check();
    return mine_;
}

void Calls::heard(int peer, const Fingerprint &theirs) {
    std::lock_guard<std::mutex> lock(mutex_);
    last_heard_[peer] = theirs;
    if (theirs.call > mine_.call)
        heard_[peer].emplace(theirs.call, theirs);
    else if (theirs.call == mine_.call)
        compare(mine_, peer, theirs);
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
        if (shared_.has(p)) {
            uint64_t call = shared_.board(p).latest_call.load(std::memory_order_acquire);
            last.call = call;
            if (call) last = shared_.board(p).records[(call - 1) % kRecords].fingerprint;
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
