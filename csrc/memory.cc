// memory: see memory.h.
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "base.h"

namespace hdma {

namespace {

using Size = unsigned long long;

std::string read_text(const std::string &path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

// False where the file is absent or holds no number ("max").
bool read_number(const std::string &path, uint64_t &value) {
    std::ifstream file(path);
    return static_cast<bool>(file >> value);
}

// The numbers behind `names` in lines of "name value" (or "name: value kB"), added up.
uint64_t sum(const std::string &text, std::initializer_list<const char *> names) {
    uint64_t total = 0, value;
    std::istringstream lines(text);
    for (std::string line, name; std::getline(lines, line);) {
        std::istringstream fields(line);
        if (fields >> name >> value)
            for (const char *wanted : names)
                if (name == wanted) total += value;
    }
    return total;
}

// Where a hierarchy of control groups is mounted, and this process's group in it.
struct Hierarchy {
    bool v2;
    std::string mount, group;
};

std::vector<Hierarchy> hierarchies(const std::string &root) {
    std::string v1_path, v2_path;
    std::istringstream groups(read_text(root + "/proc/self/cgroup"));
    for (std::string line; std::getline(groups, line);) {
        size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        if (controllers == ",,") v2_path = line.substr(second + 1);
        if (controllers.find(",memory,") != std::string::npos) v1_path = line.substr(second + 1);
    }
    std::vector<Hierarchy> found;
    std::istringstream mounts(read_text(root + "/proc/self/mountinfo"));
    for (std::string line; std::getline(mounts, line);) {
        size_t dash = line.find(" - ");
        if (dash == std::string::npos) continue;
        std::istringstream head(line), tail(line.substr(dash + 3));
        std::string skip, inside, mount, type, source, options;
        head >> skip >> skip >> skip >> inside >> mount;
        tail >> type >> source >> options;
        bool v2 = type == "cgroup2";
        if (!v2 && (type != "cgroup" || ("," + options + ",").find(",memory,") == std::string::npos)) continue;
        std::string group = v2 ? v2_path : v1_path;
        // A container may see its own group as the root of what is mounted.
        if (inside != "/") group = group.compare(0, inside.size(), inside) == 0 ? group.substr(inside.size()) : "";
        while (!group.empty() && group.back() == '/') group.pop_back();
        if (group.find("/..") == 0) group.clear();
        found.push_back({v2, root + mount, group});
    }
    return found;
}

// What a group may still take; false where it sets no limit.
bool group_left(const std::string &path, bool v2, uint64_t swap_free, MemoryLeft &left) {
    uint64_t limit, used;
    if (!read_number(path + (v2 ? "/memory.max" : "/memory.limit_in_bytes"), limit) || limit >= 1ull << 60 ||
        !read_number(path + (v2 ? "/memory.current" : "/memory.usage_in_bytes"), used))
        return false;
    std::string stat = read_text(path + "/memory.stat");
    // Caches of files go before anything else does.
    uint64_t cache = v2 ? sum(stat, {"inactive_file", "active_file", "slab_reclaimable"})
                        : sum(stat, {"total_inactive_file", "total_active_file"});
    uint64_t held = used - std::min(used, cache), swap = 0, swap_limit, swap_used;
    if (v2 && swap_free && read_number(path + "/memory.swap.current", swap_used)) {
        swap = swap_free;
        if (read_number(path + "/memory.swap.max", swap_limit))
            swap = std::min(swap, swap_limit - std::min(swap_limit, swap_used));
    }
    left.nbytes = limit - std::min(limit, held) + swap;
    left.where = format("control group %s: limit %llu bytes, %llu in use besides caches", path.c_str(),
                        static_cast<Size>(limit), static_cast<Size>(held));
    return true;
}

}  // namespace

MemoryLeft memory_left(const std::string &root) {
    std::string info = read_text(root + "/proc/meminfo");
    uint64_t swap_free = sum(info, {"SwapFree:"}) << 10;
    MemoryLeft least{(sum(info, {"MemAvailable:"}) << 10) + swap_free, "the machine's memory"};
    if (info.empty()) least.nbytes = UINT64_MAX;
    for (const Hierarchy &hierarchy : hierarchies(root)) {
        std::string group = hierarchy.group;
        for (;;) {
            MemoryLeft left{};
            if (group_left(hierarchy.mount + group, hierarchy.v2, swap_free, left) && left.nbytes < least.nbytes)
                least = left;
            if (group.empty()) break;
            group.erase(group.rfind('/'));
        }
    }
    return least;
}

void reserve_memory(int fd, size_t nbytes, size_t sharers, const std::string &what) {
    auto refuse = [&](const std::string &why, const char *remedy) {
        throw Error(Kind::Device, format("%s: %zu bytes of shared memory needed%s, %s. %s", what.c_str(), nbytes,
                                         sharers > 1 ? format(" by each of %zu ranks here", sharers).c_str() : "",
                                         why.c_str(), remedy));
    };
    rlimit limit{};
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < nbytes)
        refuse(format("but files of this process may have %llu bytes", static_cast<Size>(limit.rlim_cur)),
               "Raise the limit (ulimit -f) or set HDMA_WINDOW_BYTES lower");
    MemoryLeft left = memory_left("");
    const char *remedy =
        "Set HDMA_WINDOW_BYTES lower, free memory, or raise the limit (docker run --memory, sbatch --mem, MemoryMax=)";
    if (left.nbytes / sharers < nbytes)
        refuse(format("%llu bytes free (%s)", static_cast<Size>(left.nbytes), left.where.c_str()), remedy);
    // A signal would undo what is done so far: a timer that is quick enough, all of it for ever.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = posix_fallocate(fd, 0, static_cast<off_t>(nbytes));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    // It was there a moment ago: others took it in between.
    if (error)
        refuse(format("about %llu bytes free (%s): %s", static_cast<Size>(memory_left("").nbytes), left.where.c_str(),
                      errno_text(error).c_str()),
               remedy);
}

std::string mmap_error_text(int error) {
    rlimit limit{};
    if (error == ENOMEM && getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        return format("%s: this process may map %llu bytes in all. Raise the limit (ulimit -v) or set HDMA_WINDOW_BYTES "
                      "lower",
                      errno_text(error).c_str(), static_cast<Size>(limit.rlim_cur));
    return errno_text(error) + ". Set HDMA_WINDOW_BYTES lower or free memory";
}

}  // namespace hdma
