// The course of a rollout stage (PAT 4.2) as a Python module: rhyme_openrlhf/_stage.pyi says what is in it.
//
// rhyme_openrlhf/scheduling/stage_course.py explains the words. Arrays come in and go out, ordered by group of samples,
// then by scenario, then by cut or sample. Sizes that do not fit throw std::invalid_argument, Python's ValueError.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <vector>

namespace py = pybind11;

namespace stage {
namespace {

using Count = py::ssize_t;
using Whole = std::int64_t;
using Wholes = py::array_t<Whole, py::array::c_style | py::array::forcecast>;
using Reals = py::array_t<double, py::array::c_style | py::array::forcecast>;

// Numbers of running samples are told apart one by one up to this many; beyond it, each is an eighth below the last.
constexpr Whole FINE = 8;

void require(bool fits) {
    if (!fits) throw std::invalid_argument("the arrays of a stage do not fit together");
}

Whole rounded(double value) { return static_cast<Whole>(std::nearbyint(value)); }

// Return the sum of the values, added up as numpy does for at most 128 of them: in eight partial sums.
double total(std::span<const double> values) {
    double found = 0.0;
    std::size_t at = 0;
    if (values.size() >= 8) {
        double part[8];
        std::copy_n(values.begin(), 8, part);
        for (at = 8; at + 8 <= values.size(); at += 8)
            for (std::size_t lane = 0; lane < 8; ++lane) part[lane] += values[at + lane];
        found = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    }
    for (; at < values.size(); ++at) found += values[at];
    return found;
}

// Return the place of the last of `values` (ascending) that is not above `one`; 0 if all are.
template <typename T, typename One>
std::size_t up_to(std::span<const T> values, One one) {
    const auto after = std::upper_bound(values.begin(), values.end(), one);
    return after == values.begin() ? 0 : static_cast<std::size_t>(after - values.begin()) - 1;
}

// The last axis of an array, at the places of the axes before it.
template <typename T, int flags, typename... Places>
std::span<T> row(py::array_t<T, flags>& array, Places... places) {
    return {array.mutable_data(places...), static_cast<std::size_t>(array.shape(array.ndim() - 1))};
}
template <typename T, int flags, typename... Places>
std::span<const T> row(const py::array_t<T, flags>& array, Places... places) {
    return {array.data(places...), static_cast<std::size_t>(array.shape(array.ndim() - 1))};
}

std::vector<Whole> classes_of(Whole samples) {
    std::vector<Whole> found{samples};
    while (found.back() > 1) found.push_back(found.back() - std::max<Whole>(1, found.back() / FINE));
    return found;
}

Wholes classes(Whole samples) {
    const auto found = classes_of(samples);
    return Wholes(static_cast<Count>(found.size()), found.data());
}

py::tuple by_engine(const Wholes& contexts, const Wholes& remaining, const Wholes& engine, Count engines) {
    require(remaining.ndim() == 2 && engine.ndim() == 1 && contexts.size() == engine.size() &&
            remaining.shape(1) == engine.size() && engines > 0);
    const auto on = row(engine);
    const auto tokens = row(contexts);
    Wholes sizes(engines);
    auto size = row(sizes);
    std::vector<Whole> sums(size.size(), 0);
    std::fill(size.begin(), size.end(), 0);
    for (std::size_t sample = 0; sample < on.size(); ++sample) {
        require(0 <= on[sample] && on[sample] < engines);
        ++size[on[sample]];
        sums[on[sample]] += tokens[sample];
    }
    const auto [least, most] = std::minmax_element(size.begin(), size.end());
    require(*least > 0);
    Wholes rest({engines, remaining.shape(0), static_cast<Count>(*most)});
    std::fill_n(rest.mutable_data(), rest.size(), 0);
    std::vector<Whole> at(size.begin(), size.end());
    for (Whole& place : at) place = *most - place;
    for (std::size_t sample = 0; sample < on.size(); ++sample) {
        for (Count scenario = 0; scenario < remaining.shape(0); ++scenario)
            row(rest, on[sample], scenario)[at[on[sample]]] = row(remaining, scenario)[sample];
        ++at[on[sample]];
    }
    Reals means({engines, Count{1}});
    for (Count number = 0; number < engines; ++number)
        *means.mutable_data(number, 0) = static_cast<double>(sums[number]) / static_cast<double>(size[number]);
    return py::make_tuple(rest, means, sizes);
}

py::tuple cut(const Wholes& rest, const Wholes& sizes, Whole engines, const Reals& contexts, double drafts_per_step) {
    require(rest.ndim() == 3 && sizes.ndim() == 1 && sizes.size() == rest.shape(0) && engines > 0 &&
            contexts.ndim() == 2 && contexts.shape(0) == rest.shape(0) &&
            (contexts.shape(1) == 1 || contexts.shape(1) == rest.shape(1)));
    const Count groups = rest.shape(0), scenarios = rest.shape(1), most = rest.shape(2);
    std::vector<std::vector<Whole>> lefts;
    Count cuts = 0, columns = 0;
    Wholes counts(groups);
    for (Count group = 0; group < groups; ++group) {
        require(0 < sizes.at(group) && sizes.at(group) <= most);
        lefts.push_back(classes_of(sizes.at(group)));
        const auto count = static_cast<Count>(lefts.back().size());
        counts.mutable_at(group) = count;
        cuts = std::max(cuts, count);
        columns += count;
    }
    Wholes ends({groups, scenarios, cuts}), tokens({groups, scenarios, cuts}), middles({scenarios, columns});
    Wholes running(columns), drafts(columns);
    std::fill_n(tokens.mutable_data(), tokens.size(), 0);
    std::vector<Whole> ordered;
    Count begin = 0;
    for (Count group = 0; group < groups; ++group) {
        const auto& left = lefts[group];
        const auto count = static_cast<Count>(left.size());
        const auto runs = row(running).subspan(begin, left.size());
        for (Count at = 0; at < count; ++at) {
            runs[at] = (left[at] + engines - 1) / engines;
            drafts.mutable_at(begin + at) = rounded(static_cast<double>(runs[at]) * drafts_per_step);
        }
        for (Count scenario = 0; scenario < scenarios; ++scenario) {
            const auto own = row(rest, group, scenario);
            ordered.assign(own.begin(), own.end());
            std::sort(ordered.begin(), ordered.end());
            const double context = row(contexts, group)[contexts.shape(1) > 1 ? scenario : 0];
            const auto end_of = row(ends, group, scenario), tokens_of = row(tokens, group, scenario);
            const auto middle_of = row(middles, scenario).subspan(begin, left.size());
            Whole before = 0;
            for (Count at = 0; at < count; ++at) {
                // All but the samples that end after the cut have ended.
                const Whole end = ordered[most - 1 - (at + 1 < count ? left[at + 1] : 0)];
                end_of[at] = end;
                tokens_of[at] = end - before;
                const double each = context + static_cast<double>(end) - static_cast<double>(end - before) / 2;
                middle_of[at] = rounded(each * static_cast<double>(runs[at]));
                before = end;
            }
            std::fill(end_of.begin() + count, end_of.end(), before);
        }
        begin += count;
    }
    return py::make_tuple(ends, tokens, running, middles, drafts, counts);
}

void require_steps(const Wholes& tokens, const Reals& steps, const Wholes& counts) {
    require(tokens.ndim() == 3 && steps.ndim() == 2 && steps.shape(0) == tokens.shape(1) && counts.ndim() == 1 &&
            counts.size() == tokens.shape(0));
    Whole columns = 0;
    for (const Whole count : row(counts)) {
        require(0 < count && count <= tokens.shape(2));
        columns += count;
    }
    require(columns == steps.shape(1));
}

Reals mean_seconds(const Wholes& tokens, const Reals& steps, double tokens_per_step, const Wholes& counts) {
    require_steps(tokens, steps, counts);
    Reals found(tokens.shape(0));
    std::vector<double> each, of_scenario(static_cast<std::size_t>(tokens.shape(1)));
    Count begin = 0;
    for (Count group = 0; group < tokens.shape(0); ++group) {
        const Whole count = counts.at(group);
        each.resize(static_cast<std::size_t>(count));
        for (Count scenario = 0; scenario < tokens.shape(1); ++scenario) {
            const auto own = row(tokens, group, scenario);
            const auto step = row(steps, scenario).subspan(begin);
            for (Whole at = 0; at < count; ++at)
                each[at] = static_cast<double>(own[at]) / tokens_per_step * step[at];
            of_scenario[scenario] = total(each);
        }
        found.mutable_at(group) = total(of_scenario) / static_cast<double>(tokens.shape(1));
        begin += count;
    }
    return found;
}

py::tuple clocks(const Wholes& ends, const Wholes& tokens, const Reals& steps, double tokens_per_step,
                 const Wholes& counts) {
    require_steps(tokens, steps, counts);
    require(ends.ndim() == 3 && std::equal(ends.shape(), ends.shape() + 3, tokens.shape()));
    const Count groups = tokens.shape(0), scenarios = tokens.shape(1), cuts = tokens.shape(2);
    Wholes had({groups, scenarios, cuts + 2});
    Reals clock({groups, scenarios, cuts + 2});
    std::vector<double> last(static_cast<std::size_t>(scenarios), 0.0);
    Count begin = 0;
    for (Count group = 0; group < groups; ++group) {
        const Whole count = counts.at(group);
        for (Count scenario = 0; scenario < scenarios; ++scenario) {
            const auto own = row(tokens, group, scenario), end_of = row(ends, group, scenario);
            const auto step = row(steps, scenario).subspan(begin);
            const auto had_of = row(had, group, scenario);
            const auto clock_of = row(clock, group, scenario);
            double passed = clock_of[0] = 0.0;
            for (Whole at = 0; at < count; ++at) {
                passed += static_cast<double>(own[at]) / tokens_per_step * step[at];
                clock_of[at + 1] = passed;
            }
            std::fill(clock_of.begin() + count + 1, clock_of.end(), std::numeric_limits<double>::infinity());
            had_of[0] = 0;
            std::copy(end_of.begin(), end_of.end(), had_of.begin() + 1);
            had_of[cuts + 1] = end_of[cuts - 1];
            last[scenario] = std::max(last[scenario], passed);
        }
        begin += count;
    }
    return py::make_tuple(had, clock, total(last) / static_cast<double>(scenarios));
}

void require_samples(const Wholes& had, const Reals& clock, const Wholes& engine, const Wholes& remaining) {
    require(had.ndim() == 3 && clock.ndim() == 3 && std::equal(had.shape(), had.shape() + 3, clock.shape()) &&
            had.shape(2) > 1 && remaining.ndim() == 2 && remaining.shape(0) == had.shape(1) && engine.ndim() == 1 &&
            engine.size() == remaining.shape(1));
    for (const Whole on : row(engine)) require(0 <= on && on < had.shape(0));
}

Reals moments_of_ends(const Wholes& had, const Reals& clock, const Wholes& counts, const Wholes& engine,
                      const Wholes& remaining) {
    require_samples(had, clock, engine, remaining);
    require(counts.ndim() == 1 && counts.size() == had.shape(0));
    for (const Whole count : row(counts)) require(0 < count && count < had.shape(2));
    Reals found({remaining.shape(0), remaining.shape(1)});
    for (Count scenario = 0; scenario < remaining.shape(0); ++scenario) {
        const auto end_of = row(found, scenario);
        for (std::size_t sample = 0; sample < end_of.size(); ++sample) {
            const Whole on = row(engine)[sample], tokens = row(remaining, scenario)[sample];
            const auto last = static_cast<std::size_t>(counts.at(on));
            const auto had_of = row(had, on, scenario);
            const auto clock_of = row(clock, on, scenario);
            if (tokens == had_of[last]) {
                end_of[sample] = clock_of[last];
                continue;
            }
            const std::size_t at = std::min(up_to(had_of, tokens), last - 1);
            const auto wide = static_cast<double>(std::max<Whole>(had_of[at + 1] - had_of[at], 1));
            const double each = (clock_of[at + 1] - clock_of[at]) / wide;
            end_of[sample] = each * static_cast<double>(tokens - had_of[at]) + clock_of[at];
        }
    }
    return found;
}

void require_order(const Reals& ends, const Wholes& order, const Wholes& lefts) {
    require(ends.ndim() == 2 && order.ndim() == 2 && std::equal(ends.shape(), ends.shape() + 2, order.shape()) &&
            lefts.ndim() == 1);
    for (const Whole left : row(lefts)) require(0 < left && left < ends.shape(1));
    require(std::all_of(order.data(), order.data() + order.size(),
                        [&](Whole sample) { return 0 <= sample && sample < ends.shape(1); }));
}

Reals mean_moments(const Reals& ends, const Wholes& order, const Wholes& lefts) {
    require_order(ends, order, lefts);
    Reals found(lefts.size());
    std::vector<double> moments(static_cast<std::size_t>(ends.shape(0)));
    for (Count at = 0; at < lefts.size(); ++at) {
        for (Count scenario = 0; scenario < ends.shape(0); ++scenario)
            moments[scenario] = row(ends, scenario)[row(order, scenario)[ends.shape(1) - lefts.at(at) - 1]];
        found.mutable_at(at) = total(moments) / static_cast<double>(ends.shape(0));
    }
    return found;
}

// Return the whole tokens that a sample of this clock has at the moment.
Whole tokens_at(std::span<const Whole> had, std::span<const double> clock, double moment) {
    const std::size_t at = std::min(up_to(clock, moment), clock.size() - 2);
    const double rate = static_cast<double>(had[at + 1] - had[at]) / (clock[at + 1] - clock[at]);
    return rounded(rate * (moment - clock[at]) + static_cast<double>(had[at]));
}

py::tuple when_left(const Wholes& had, const Reals& clock, const Wholes& engine, const Wholes& contexts,
                    const Wholes& remaining, const Wholes& order, const Reals& ends, const Wholes& lefts) {
    require_samples(had, clock, engine, remaining);
    require_order(ends, order, lefts);
    require(std::equal(ends.shape(), ends.shape() + 2, remaining.shape()) && contexts.size() == engine.size());
    const Count scenarios = remaining.shape(0), samples = remaining.shape(1);
    Wholes rest({lefts.size(), scenarios, samples});
    std::fill_n(rest.mutable_data(), rest.size(), 0);
    Reals means({lefts.size(), scenarios});
    py::list usual(lefts.size());
    std::vector<Whole> whole(static_cast<std::size_t>(had.shape(0))), there, sums;
    for (Count at = 0; at < lefts.size(); ++at) {
        const Whole left = lefts.at(at);
        sums.assign(static_cast<std::size_t>(left), 0);
        for (Count scenario = 0; scenario < scenarios; ++scenario) {
            const auto sequence = row(order, scenario);
            const double moment = row(ends, scenario)[sequence[samples - left - 1]];
            for (Count on = 0; on < had.shape(0); ++on)
                whole[on] = tokens_at(row(had, on, scenario), row(clock, on, scenario), moment);
            const auto still = row(remaining, scenario);
            const auto rest_of = row(rest, at, scenario);
            there.clear();
            Whole sum = 0;
            for (Count place = samples - left; place < samples; ++place) {
                const Whole sample = sequence[place];
                const Whole tokens = std::min(whole[row(engine)[sample]], still[sample] - 1);
                there.push_back(row(contexts)[sample] + tokens);
                rest_of[place] = still[sample] - tokens;
                sum += there.back();
            }
            *means.mutable_data(at, scenario) = static_cast<double>(sum) / static_cast<double>(left);
            std::sort(there.begin(), there.end());
            for (std::size_t place = 0; place < there.size(); ++place) sums[place] += there[place];
        }
        py::list of_left(left);
        for (Whole place = 0; place < left; ++place)
            of_left[place] = rounded(static_cast<double>(sums[place]) / static_cast<double>(scenarios));
        usual[at] = of_left;
    }
    return py::make_tuple(usual, rest, means);
}

Wholes scenarios_of(const Wholes& generated, const Wholes& history, const Wholes& lengths, const Wholes& begins,
                    Whole longest_allowed, Count scenarios, Whole shift) {
    require(generated.ndim() == 1 && history.ndim() == 1 && history.size() == generated.size() &&
            lengths.ndim() == 1 && begins.ndim() == 1 && scenarios > 0 && begins.size() > 0 && begins.at(0) == 0 &&
            begins.at(begins.size() - 1) == lengths.size());
    const auto begin_of = row(begins);
    require(std::is_sorted(begin_of.begin(), begin_of.end()));
    const auto given = row(lengths);
    std::vector<Whole> known(given.begin(), given.end());
    for (Whole& length : known) length = std::min(length, longest_allowed);
    for (std::size_t number = 0; number + 1 < begin_of.size(); ++number)
        std::sort(known.begin() + begin_of[number], known.begin() + begin_of[number + 1]);
    Wholes found({scenarios, generated.size()});
    for (Count sample = 0; sample < generated.size(); ++sample) {
        const Whole now = generated.at(sample), number = history.at(sample);
        require(0 <= number && number + 1 < begins.size());
        const auto end = known.begin() + begin_of[number + 1];
        const auto first = std::upper_bound(known.begin() + begin_of[number], end, now);
        for (Count scenario = 0; scenario < scenarios; ++scenario) {
            const auto turn = static_cast<double>((scenario + sample * shift) % scenarios);
            const double quantile = (turn + 0.5) / static_cast<double>(scenarios);
            Whole rest = 1;
            if (now < longest_allowed && first != end) {
                rest = first[static_cast<Count>(quantile * static_cast<double>(end - first))] - now;
            } else if (now < longest_allowed && begin_of[number] == begin_of[number + 1]) {
                // Nothing is known: all lengths up to the longest are equally likely.
                rest = static_cast<Whole>(quantile * static_cast<double>(longest_allowed - now));
            } else if (now < longest_allowed) {
                // A Pareto law from here on, cut off at the longest: quantiles of P(L > l) = least / l.
                const auto least = static_cast<double>(std::max<Whole>(now, 1));
                const double share = 1 - least / static_cast<double>(longest_allowed);
                rest = static_cast<Whole>(least / (1 - quantile * share) - static_cast<double>(now));
            }
            *found.mutable_data(scenario, sample) = std::max<Whole>(rest, 1);
        }
    }
    return found;
}

}  // namespace
}  // namespace stage

PYBIND11_MODULE(_stage, module) {
    using namespace stage;
    module.def("classes", &classes);
    module.def("by_engine", &by_engine);
    module.def("cut", &cut);
    module.def("mean_seconds", &mean_seconds);
    module.def("clocks", &clocks);
    module.def("moments_of_ends", &moments_of_ends);
    module.def("mean_moments", &mean_moments);
    module.def("when_left", &when_left);
    module.def("scenarios_of", &scenarios_of);
}
