// proxy: the thread that feeds the wire. It walks the put and credit lanes; it never calls a device's driver.
//
// Protocol: submit() appends a plan to both lanes. Each lane is walked in order; a step that cannot go on (a wait for
// a flag, a wire with too many puts outstanding) holds its own lane only.
//
//     walking thread --submit--> [plan, plan, ...]  put lane    --post--> wire --> rail peers
//     node mates, walker --flags, doorbell-->       credit lane --post-->
//     wire --arrived, sent--> flags of this rank
//
// Threading: submit, drain, close: any thread; everything else is the proxy's own.
//
// Ordering: a put is posted after its wait saw the flag (acquire), so the NIC reads what the walker wrote; a flag for
// an arrival is raised (release) after the wire has written the payload. Before it sleeps the proxy says so, then
// looks once more (shared.h).
#pragma once

#include <deque>
#include <memory>
#include <mutex>

#include "calls.h"
#include "wire/wire.h"

namespace hdma {

class Proxy final : public Wire::Sink {
  public:
    // `silent`: flags are raised by streams, which cannot wake who sleeps.
    Proxy(int rank, size_t ring_count, char *window, bool silent, Shared &shared, Calls &calls, Fault &fault);
    ~Proxy() override { close(); }
    void start(std::unique_ptr<Wire> wire);

    // The lanes of one run of a plan.
    void submit(std::shared_ptr<const LoadedPlan> plan, const Fingerprint &fingerprint);
    // Until everything submitted has left this machine; false at the deadline or at the fault.
    bool drain(int64_t deadline_ns);
    void close();
    void forget();  // in a forked child: see Control::forget

    uint64_t put_nbytes() const { return put_nbytes_.load(std::memory_order_relaxed); }
    uint64_t puts() const { return puts_.load(std::memory_order_relaxed); }
    uint64_t sent_nbytes();

    void announced(int peer, const Fingerprint &fingerprint) override { calls_.heard(peer, fingerprint); }
    void arrived(uint32_t flag, uint32_t value) override { shared_.raise(rank_, flag, value, false); }
    void sent(uint32_t local_flag, uint32_t value) override { shared_.raise(rank_, local_flag, value, false); }
    void lost(int peer, const std::string &reason) override;
    void garbled(int peer, const std::string &what) override;

  private:
    struct Run {
        std::shared_ptr<const LoadedPlan> plan;
        Fingerprint fingerprint;
    };
    struct Cursor {
        std::vector<Step> LoadedPlan::*steps;
        std::deque<Run> runs;
        std::vector<uint32_t> base;  // running chunk count of each ring
        size_t at = 0;
    };
    struct Loss {
        int peer;
        std::string reason;
        int64_t since_ns;
    };
    void run();
    bool advance(Cursor &cursor);
    bool execute(const LoadedPlan &plan, const Step &step, const Cursor &cursor);
    bool runnable(const Cursor &cursor);
    void take_submitted();
    void report_losses();
    void sleep();

    int rank_;
    char *window_;
    bool silent_;
    Shared &shared_;
    Calls &calls_;
    Fault &fault_;
    std::unique_ptr<Wire> wire_;
    Cursor lanes_[2];
    std::vector<Loss> losses_;

    std::mutex mutex_;
    std::deque<Run> submitted_;
    std::atomic<bool> stop_{false}, idle_{true};
    std::atomic<uint64_t> submitted_count_{0}, taken_count_{0}, puts_{0}, put_nbytes_{0};
    std::mutex wire_mutex_;  // sent_nbytes() against close()
    uint64_t sent_nbytes_ = 0;  // at close()
    Thread thread_;
};

}  // namespace hdma
