#include "confinement.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <utility>

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __linux__
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#if __has_include(<linux/landlock.h>)
#include <linux/landlock.h>
#define EVALRT_LANDLOCK 1
#endif
#endif

namespace evalrt::program {
namespace {

namespace fs = std::filesystem;

#ifdef __linux__
constexpr auto shared_memory = "/dev/shm";
constexpr std::size_t most_shown = 1000; // each is a mount

bool write_to(const char* file, const std::string& text) {
    const int fd = ::open(file, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return false;
    const bool whole = ::write(fd, text.data(), text.size()) == ssize_t(text.size());
    ::close(fd);
    return whole;
}

// "1000 1000 1": we stay who we are.
std::string same(unsigned id) { return fmt::format("{} {} 1", id, id); }

// Its own mounts, shared memory segments and message queues. Who is not root needs to be root of a
// user namespace for that, in which files of other users seem to belong to nobody.
bool part_ways(const std::string& user, const std::string& group) {
    constexpr int apart = CLONE_NEWNS | CLONE_NEWIPC;
    if (::unshare(apart) != 0 &&
        (::unshare(apart | CLONE_NEWUSER) != 0 || !write_to("/proc/self/setgroups", "deny") ||
         !write_to("/proc/self/uid_map", user) || !write_to("/proc/self/gid_map", group)))
        return false;
    // What the system mounts meanwhile is seen here, but not the other way round.
    if (::mount(nullptr, "/", nullptr, MS_REC | MS_SLAVE, nullptr) != 0) return false;
    if (::access(shared_memory, F_OK) != 0) return true; // nor does anybody need it
    return ::chdir(shared_memory) == 0 &&
           ::mount("evalrt", shared_memory, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777") == 0;
}

// From the old /dev/shm, which is the current folder.
void show(const char* name, const char* target, bool folder) {
    struct { // struct mount_attr, not in every system's header
        std::uint64_t set = 1 /* MOUNT_ATTR_RDONLY */, clear = 0, propagation = 0, space = 0;
    } read_only;
    constexpr long mount_setattr = 442; // on every processor but Alpha
    if (folder ? ::mkdir(target, 0700) != 0 : ::mknod(target, S_IFREG | 0600, 0) != 0) return;
    if (::mount(name, target, nullptr, MS_BIND, nullptr) == 0) {
        if (::syscall(mount_setattr, AT_FDCWD, target, 0, &read_only, sizeof read_only) == 0)
            return;
        ::umount2(target, MNT_DETACH);
    }
    if (folder)
        ::rmdir(target);
    else
        ::unlink(target);
}
#endif

#ifdef EVALRT_LANDLOCK
constexpr std::uint64_t writing = LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_REMOVE_DIR |
                                  LANDLOCK_ACCESS_FS_REMOVE_FILE | LANDLOCK_ACCESS_FS_MAKE_CHAR |
                                  LANDLOCK_ACCESS_FS_MAKE_DIR | LANDLOCK_ACCESS_FS_MAKE_REG |
                                  LANDLOCK_ACCESS_FS_MAKE_SOCK | LANDLOCK_ACCESS_FS_MAKE_FIFO |
                                  LANDLOCK_ACCESS_FS_MAKE_BLOCK | LANDLOCK_ACCESS_FS_MAKE_SYM;
constexpr std::uint64_t moving = 1 << 13, truncating = 1 << 14; // not in every system's header

long landlock_version() {
    return ::syscall(SYS_landlock_create_ruleset, nullptr, 0, LANDLOCK_CREATE_RULESET_VERSION);
}

std::uint64_t handled(long version) {
    return writing | (version >= 2 ? moving : 0) | (version >= 3 ? truncating : 0);
}

// `access`: below a folder, or to a file.
bool allow(int rules, const char* path, std::uint64_t access) {
    landlock_path_beneath_attr beneath{};
    beneath.allowed_access = access;
    beneath.parent_fd = ::open(path, O_PATH | O_CLOEXEC);
    if (beneath.parent_fd < 0) return false;
    const long failed =
        ::syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &beneath, 0);
    ::close(beneath.parent_fd);
    return failed == 0;
}

// Devices that keep nothing for another process: those that every program takes for granted, and
// what a graphics processor is reached by.
std::vector<std::string> devices() {
    std::vector<std::string> all;
    for (const auto name : {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts"})
        all.push_back(std::string("/dev/") + name);
    std::error_code ec;
    for (auto it = fs::directory_iterator("/dev", ec); !ec && it != fs::directory_iterator();
         it.increment(ec)) {
        const auto name = it->path().filename().string();
        if (name.starts_with("nvidia") || name == "dri" || name == "kfd" || name == "dxg")
            all.push_back(it->path().string());
    }
    return all;
}

// A rule set by which nothing can be written but below this folder; -1: there is none.
int make_rules(const std::string& folder) {
    const long version = landlock_version();
    landlock_ruleset_attr all{};
    all.handled_access_fs = handled(version);
    const int rules = int(::syscall(SYS_landlock_create_ruleset, &all, sizeof all, 0));
    if (rules < 0) return -1;
    if (!allow(rules, folder.c_str(), all.handled_access_fs)) {
        ::close(rules);
        return -1;
    }
    for (const auto& it : devices())
        allow(rules, it.c_str(), LANDLOCK_ACCESS_FS_WRITE_FILE | (version >= 3 ? truncating : 0));
    return rules;
}

bool obey(int rules, bool own_memory) {
    if (own_memory && !allow(rules, shared_memory, handled(landlock_version())) && errno != ENOENT)
        return false;
    return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           ::syscall(SYS_landlock_restrict_self, rules, 0) == 0;
}
#else
int make_rules(const std::string&) { return -1; }
bool obey(int, bool) { return false; }
#endif

} // namespace

bool can_confine() {
#ifdef EVALRT_LANDLOCK
    return landlock_version() >= 1;
#else
    return false;
#endif
}

std::string why_no_own_memory([[maybe_unused]] const std::string& root) {
#ifdef __linux__
    std::error_code ec;
    const auto memory = fs::canonical(shared_memory, ec).string();
    if (!ec && root.starts_with(memory + "/")) return "the folder for temporary files is there";
    const auto user = same(::geteuid()), group = same(::getegid());
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(part_ways(user, group) ? 0 : errno);
    int status = 0;
    while (pid > 0 && ::waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    if (pid > 0 && !WIFEXITED(status)) return "it did not survive the attempt";
    const int error = pid < 0 ? errno : WEXITSTATUS(status);
    return error == 0 ? "" : std::strerror(error);
#else
    return {};
#endif
}

Walls::Walls(const Confinement& place) : place_(place) {
    nothing_ = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    errors_ = ::open(place.errors.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (nothing_ < 0 || errors_ < 0) error_ = std::strerror(errno);
    if (can_confine() && (rules_ = make_rules(place.root)) < 0) error_ = std::strerror(errno);
#ifdef __linux__
    user_ = same(::geteuid());
    group_ = same(::getegid());
    std::error_code ec;
    if (!place.own_memory) return;
    for (auto it = fs::directory_iterator(shared_memory, ec);
         !ec && it != fs::directory_iterator() && shown_.size() < most_shown; it.increment(ec)) {
        std::error_code gone;
        const bool folder = it->is_directory(gone);
        const auto name = it->path().filename().string();
        if (!it->is_symlink(gone) && (folder || it->is_regular_file(gone)))
            shown_.push_back({name, shared_memory + ("/" + name), folder});
    }
#endif
}

Walls::~Walls() {
    for (const int fd : {nothing_, errors_, rules_})
        if (fd >= 0) ::close(fd);
}

bool Walls::enter() const {
    ::setsid();
#ifdef __linux__
    if (place_.own_memory) {
        if (!part_ways(user_, group_)) return false;
        for (const auto& it : shown_) show(it.name.c_str(), it.target.c_str(), it.folder);
    }
#endif
    return ::chdir(place_.folder.c_str()) == 0 && ::dup2(nothing_, 0) >= 0 &&
           ::dup2(nothing_, 1) >= 0 && ::dup2(errors_, 2) >= 0 &&
           (rules_ < 0 || obey(rules_, place_.own_memory));
}

#ifdef __linux__
namespace {

// Those of this process; what they leave becomes its own. False: the system does not tell.
bool kill_children() {
    const int fd = ::open("/proc/thread-self/children", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    char text[4096];
    pid_t pid = 0;
    for (ssize_t n = 0; (n = ::read(fd, text, sizeof text)) > 0;)
        for (ssize_t i = 0; i < n; ++i) {
            if (text[i] >= '0' && text[i] <= '9') {
                pid = pid * 10 + (text[i] - '0');
            } else if (const pid_t whole = std::exchange(pid, 0); whole > 0) {
                ::kill(whole, SIGKILL);
            }
        }
    ::close(fd);
    return true;
}

[[noreturn]] void watch(pid_t command) {
    sigset_t news;
    ::sigemptyset(&news);
    ::sigaddset(&news, SIGCHLD);
    ::sigaddset(&news, SIGTERM);
    int status = 0, one = 0, number = 0;
    for (bool there = true; there && ::sigwait(&news, &number) == 0 && number == SIGCHLD;)
        for (pid_t pid; there && (pid = ::waitpid(-1, &one, WNOHANG)) > 0;)
            if (pid == command) {
                status = one;
                there = false;
            }
    for (;;) {
        const bool all = kill_children();
        if (!all) ::kill(-command, SIGKILL);
        const pid_t pid = ::waitpid(all ? -1 : command, &one, 0);
        if (pid == command) status = one;
        if (pid < 0) break;
    }
    ::_exit(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
}

} // namespace

int Walls::mind(int open) {
    ::signal(SIGCHLD, SIG_DFL);
    if (::prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0) return -1;
    const pid_t self = ::getpid(), pid = ::fork();
    if (pid < 0) return -1;
    if (pid > 0) {
        ::close(open);
        watch(pid);
    }
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != self) ::_exit(127);
    ::setsid();
    return 0;
}
#else
int Walls::mind(int) { return 0; }
#endif

} // namespace evalrt::program
