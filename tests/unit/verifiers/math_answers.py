r"""Answers that are one another's spellings, and neighbours that are not: data for the math reward.

A family is a list of classes. The first member of a class is equal to each other one; the
first members of two classes of one family are different. Both hold in either order.
"""

# ruff: noqa: RUF001, E501

from __future__ import annotations

from itertools import combinations

FAMILIES: dict[str, list[list[str]]] = {
    "what follows a number": [
        ["5", "5.", "5.0", "+5", "$5", "$5$", r"\$5", r"5\text{ cm}", "5 cm", "5cm", "5 apples",
         "5 red balls", "5 miles per hour", "5 km/h", "5 square meters", r"5 \text{ m}^2", "5 people",
         "5 sandwiches", "5 left", "5 hours a day", "x = 5", r"n=5", "{5}", r"\{5\}", "(5)",
         "10/2", r"\frac{10}{2}", "5 units", "5 dollars per child", r"5\ \mathrm{cm^3}"],
        ["25", "5^2", "5 \\cdot 5"], ["5 squared"], ["5 cubed"], ["120", "5!"], ["5 factorial"],
        ["5 hundred", "500"], ["5 thousand", "5000", "5,000"],
        ["5 million", "5 millions", "5000000", "5{,}000{,}000", "5 million dollars", r"5\times 10^6"],
        ["5 billion", "5 billions", "5e9", r"5 \cdot 10^{9}"], ["5 dozen", "60", "5 dozens", "5 dozen eggs"],
        ["5 tenths"], ["5 hundredths"], ["5 thirds"], ["5 halves"], ["5 mod 7"], ["5 times 3"],
        ["5 plus 2"], ["5 minus 2"], ["5 over 2"], ["5 choose 2"], ["5 or 6", "5, 6", r"\{5,6\}", "6, 5"],
        ["5 point two"], ["5 less than x"], ["5 to the power of 3"], ["5 base 7 plus"],
        ["5 log"], ["5 sin"], ["5 pi", r"5\pi", "5π"], ["5x"], ["5 x^2"], ["5 primorial"], ["5t"], ["5h"], ["5c"],
        ["5 i"], ["-5", "−5", "$-5$", "－5", "-5 degrees"], ["5 per 3 over"], ["5 below zero"],
        ["5 root 2"], ["5 sqrt 3"], ["5 quarters"], ["5 scores"], ["5 trillions", "5e12"], ["5 times as many apples"],
        ["5 fourteenths"], ["5 thirtieths"], ["5 twelfths"], ["5 octillions"], ["5 zillions"], ["5 negatives"], ["5 twentyfifths"], ["5 googols"], ["5 red seventeenths"],
        ["half"], ["5 half apples"], ["5 negative"], ["5 times 3 apples"], ["5 and a half apples"],
    ],
    "units of one kind": [
        ["5 km", "5000 m", "5 kilometers", r"5\,\text{km}", "5000 metres"], ["5 m", "500 cm"], ["5 cm"],
        ["5 miles"], ["5 kg", "5000 g", "5 kilograms"], ["5 hours", "300 minutes"], ["5 dollars", "500 cents"],
        ["5 m^2", "5 square meters", "5 m²", "5 sq m"], ["5 m^3", "5 cubic meters"],
        ["5 km/h", "5 km per hour", "5000 m/h"], ["5 apples", "5 red apples", "5 small red apples"], ["5 oranges"],
    ],
    "money": [["18 dollars", r"\$18", r"$\$18$", "$18", "1800 cents", r"\$18.00"], ["18 cents", r"\$0.18", r"\$.18"], ["18 euros"]],
    "cut off": [["1/7", "0.142857...", r"0.142857\ldots"], ["1/8"], ["0.142856..."]],
    "angles in degrees": [
        [r"\frac12", r"\sin 30^\circ", r"\cos(60°)", r"\sin{30^{\circ}}", r"2\sin^2 30^\circ"], ["1", r"\tan 45^\circ"],
        [r"\sin 30"], [r"\sin 20^\circ", r"\cos 70^\circ"],
    ],
    "temperatures": [
        ["25 degrees Celsius", "25 degrees C", "25 deg C", "25 celsius", "25 degrees celsius", "25"],
        ["77 degrees Fahrenheit"], ["25.5 degrees Celsius"], ["5 deg CF"],
    ],
    "scales": [["25 degrees Celsius"], ["25 degrees Fahrenheit", "25 degrees F", "25 fahrenheit"], ["25 kelvin", "25 degrees Kelvin"]],
    "bounds with the unknown": [["y<xy"], ["y<x"], ["y<z"]],
    "adjectives": [["5 red apples", "5 small red apples"], ["5 green apples"], ["5 red balls"]],
    "units behind fractions": [
        [r"\frac{1}{2}", r"\frac{1}{2}\text{ cups}", r"\frac12\text{ cup}", "(1/2) cups", r"\dfrac{1}{2}\,\mathrm{m}", r"$\frac{1}{2}$ cups", "1/2 of the pizza",
         r"\frac{1}{2}\text{ of the pizza}", r"x=\frac{1}{2}\text{ cm}", r"0.5\text{ inches}", r"\frac{1}{2}\text{ m}^2"],
        [r"\frac{1}{2} x"], [r"\frac12\text{ squared}"], [r"\frac{1}{2}\text{ million}"], [r"\frac{1}{2} of twelve"],
        [r"\frac{13}{2}\text{ feet}", "6.5", "6.5 ft", r"6\frac{1}{2}\text{ feet}", r"78\text{ inches}"], [r"\frac{13}{2}\text{ miles}"],
        [r"2\frac12", r"2\frac{1}{2}\text{ hours}", "2.5 h", r"\frac{5}{2}\text{ h}"], [r"\frac{3}{2} h"], [r"\frac{3}{2}", r"\frac{3}{2}\text{ h}"],
        [r"\frac{1}{4}\text{ m}", r"25\text{ cm}", "0.25", r"\frac{1}{4}\text{ meters}"],
    ],
    "units behind roots and powers": [
        [r"2\sqrt{3}", r"2\sqrt{3}\text{ cm}", r"\sqrt{12}\ \mathrm{cm}", "2√3 cm", r"2\sqrt{3}\text{ miles per hour}", r"2\sqrt3\text{ m}", r"\sqrt{12}"],
        [r"2\sqrt{3} x"], [r"2\sqrt{3}\text{ thirds}"], [r"2\sqrt{3}\text{ million}"], [r"3\sqrt{3}\text{ cm}"],
        [r"3+\sqrt{2}", r"(3+\sqrt{2})\text{ cm}", r"3+\sqrt{2}\text{ cm}", r"3+\sqrt{2}\text{ units}"], [r"3+\sqrt{2}\text{ squared}"],
        [r"10^3", r"10^{3}\text{ meters}", "1000", r"10^3\text{ people}"], [r"2^{10}", r"2^{10}\text{ bytes}", "1024"], [r"10!\text{ ways}", "10!", "3628800"],
        [r"\binom{5}{2}\text{ ways}", "10", "10 ways"], [r"(\frac12, \sqrt{3})", r"(\frac12\text{ cm}, \sqrt3\text{ cm})"],
    ],
    "two roots with units": [[r"2\sqrt{3}\text{ m}", r"200\sqrt{3}\text{ cm}"], [r"2\sqrt{3}\text{ cm}"], [r"2\sqrt{3}\text{ m}^2"], [r"2\sqrt{3}\text{ hours}"]],
    "units behind pi": [
        [r"12\pi", r"12\pi\text{ square inches}", r"12\pi\text{ m}", r"12\pi\text{ m}^2", r"12\pi \text{ cm}^3", "12π m²", "12 pi square inches", r"12 \pi\,\mathrm{m}"],
        [r"12\pi r"], [r"12\pi h", r"12h\pi"], [r"13\pi\text{ cm}"], [r"12\pi\text{ thirds}"], [r"12\pi m"],
        [r"\frac{\pi}{3}", r"\frac{\pi}{3}\text{ radians}"], [r"\frac{9\pi}{2}", r"\frac{9\pi}{2}\,\text{cm}^3", r"4.5\pi"], [r"\frac{9\pi}{2} h"],
        [r"2\pi r", r"2\pi r\text{ cm}"], [r"2\pi r h"],
    ],
    "shares of something": [
        ["25%", r"25\%\text{ increase}", "25% of the students", "25 percent increase"], ["25% more"], ["25% of 30"], ["30% increase"],
    ],
    "shares that grow": [["25% increase", r"25\%\text{ increase}"], ["25% decrease"]],
    "bases": [
        ["2516_8", "2516_{8}", r"2516_{\text{eight}}", "(2516)_8", "2516 base 8", "2516₈"], ["2516_9"],
        ["2516_7"], ["2516", "2,516"], ["1A_{16}", "26"], ["1011_2", "11", "13_8", "1011_{2}"],
    ],
    "base ten": [["10_{10}", "10"], ["10_2", "2"], ["10_3", "3"], ["18_9"], ["19_9"]],
    "letters": [
        ["ABC", r"\text{ABC}", "$ABC$"], ["BCA"], ["CAB"], ["abc"], ["AB"], ["BA"],
        [r"\triangle ABC"], [r"\triangle BCA"], [r"\angle ABC"], [r"\angle BAC"],
    ],
    "one letter": [
        ["k", "$k$", r"\text{k}"], ["K"], ["2k", "k \\cdot 2", "k+k"], ["2K"], ["k_1", "k_{1}"], ["K_1"], ["k_2"],
        ["k'"], ["k''"], ["k^T", "k^{T}", r"k^\top"], [r"\vec{k}"], [r"\bar{k}"], [r"\hat{k}"], ["k^2", "kk"], ["k!"], ["|k|"],
    ],
    "capitals": [["I"], ["i"], ["E"], ["e"], ["T"], ["t"], ["x + Y", "Y+x"], ["X + y"], ["X+Y"], ["x+y"],
                 ["A = B"], ["a = b"], ["A^T"], ["A"], ["a"]],
    "words": [["no", "No", r"\text{No}"], ["on"], ["yes", "Yes", "YES"], ["even"], ["neve"], ["odd"], ["true", "True"],
              ["false"], ["dog"], ["god"]],
    "products": [["xy", "yx", r"x \cdot y"], ["2ab", "2ba", "ab+ba"], ["x+y", "y+x"], ["x"], ["y"]],
    "primes": [["f'(0)", "f′(0)"], ["f(0)"], ["-2f'(0)"], ["-2f(0)"], ["0"], ["f''(0)"]],
    "mixed numbers": [
        ["2 1/3", "7/3", r"2\frac{1}{3}", r"2 \frac13", r"2\dfrac{1}{3}", "2⅓", "2 ⅓", r"\frac{7}{3}", r"2.\overline{3}",
         r"2 + \frac{1}{3}", r"\tfrac73"],
        ["2/3"], ["21/3", "7"], ["1/3"], ["-2 1/3", r"-2\frac{1}{3}", "-7/3", "−2⅓"], ["2 2/3", "8/3"], ["2 1/4", "2.25"],
        ["-5/3", r"-2+\frac13", r"-2 + \frac{1}{3}", "-(1+2/3)", r"-1\frac23"],
    ],
    "repeating": [
        [r"0.\overline{3}", "1/3", r"0.\bar{3}", r"0.\dot{3}", "0.(3)", "0.333...", r"0.333\ldots", "0.333…", "0.3̅", "0.333333"],
        [r"0.\overline{36}", "4/11", r"0.\dot{3}\dot{6}", "0.363636..."], [r"0.3\overline{6}", "11/30", "0.3666..."],
        ["0.3", "3/10", ".3"], ["0.33"], ["0.36"], [r"0.\overline{03}", "1/33"],
        [r"0.\overline{142857}", "1/7", r"\frac{1}{7}"], [r"1.\overline{3}", "4/3", "1 1/3"],
    ],
    "signs": [
        ["√2", r"\sqrt{2}", r"\sqrt2", r"2/\sqrt{2}", r"\frac{2}{\sqrt{2}}", r"2^{1/2}", "sqrt(2)"], ["2"], ["1.4"],
        ["2√3", r"2\sqrt{3}", r"\sqrt{12}", "√12"], ["√3"], ["−√2", r"-\sqrt{2}"],
        ["½", "1/2", "0.5", r"\frac12", "1⁄2"], ["¾", "0.75"], ["x²", "x^2", "x·x"], ["x³"], ["x₁", "x_1"], ["3π/4", r"\frac{3\pi}{4}"],
        ["∞", r"\infty", r"+\infty", "infinity"], ["-∞", r"-\infty"], ["3 × 4", "12", r"3\cdot 4", "3·4"], ["8÷3"], ["∛2", r"\sqrt[3]{2}"],
    ],
    "grouped digits": [
        ["12345", "12,345", r"12\,345", "12\u2009345", "12\u202f345", "12\u00a0345", r"12{,}345", "12 345", "12345.0"],
        ["12.345"], ["12, 345"], ["123"],
    ],
    "scaled": [
        ["12 million", "12000000", "12,000,000", r"12\text{ million}", r"1.2\times10^7", "12 million people"],
        ["12"], ["12 billion"], ["1.2 million", "1200000"], ["12 thousand", "12000"],
    ],
    "empty sets": [[r"\varnothing", r"\emptyset", "∅", r"\{\}", "{}", r"\{ \}", "Ø"], ["0"], [r"\{1\}"], ["o"]],
    "intervals": [
        ["(0,1)", "0 < x < 1", r"x \in (0, 1)", "1 > x > 0", r"\left(0, 1\right)", "(0, 1.0)"],
        ["[0,1]", r"0 \le x \le 1", r"0\leq x\leq 1", "0≤x≤1", r"x\in[0,1]", "0 <= x <= 1"],
        ["[0,1)", r"0 \leqslant x < 1"], ["(0,1]", r"1 \geq x > 0"], [r"\{0, 1\}", r"\{1,0\}"], ["(0,2)", "0<x<2"],
    ],
    "half lines": [
        [r"[0,\infty)", r"x \ge 0", "x≥0", r"0 \le x", r"x\geqslant 0", r"[0, +\infty)", r"\{x : x \ge 0\}", r"\{x \mid x \geq 0\}"],
        [r"(0,\infty)", "x > 0", "0<x"], [r"(-\infty,0)", "x<0", "0 > x"], [r"(-\infty,0]", r"x \le 0"], [r"(1,\infty)", "x>1"],
    ],
    "unions": [
        [r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)", "x<2 or x>3", r"x<2 \text{ or } x>3", r"x \in (-\infty,2) \cup (3,\infty)",
         "(−∞, 2) ∪ (3, ∞)"],
        [r"(-\infty,2]\cup(3,\infty)"], [r"(-\infty,2)\cup(4,\infty)"], ["2 < x < 3"],
        [r"x \ne 2", r"(-\infty,2)\cup(2,\infty)", "x≠2"], [r"\mathbb{R}", r"(-\infty,\infty)", "ℝ", "all real numbers"],
    ],
    "unknowns": [["x > 2", "2 < x"], ["y > 2"], ["x < 2"], ["x \\ge 2"], ["x > 3"]],
    "tuples and sets": [
        ["(1, 2)", r"\left(1,2\right)", r"(1, \frac{4}{2})", "(1.0, 2)"], ["(2, 1)"], [r"\{1, 2\}", r"\{2,1\}", r"\{1,2,2\}"], ["(1,2,3)", r"\langle 1,2,3\rangle", r"\left\langle 1, 2, 3 \right\rangle", "⟨1,2,3⟩"],
        [r"\{1,2,3\}"], [r"\langle 1,3,2\rangle"], [r"\langle 1,2,2,3\rangle"], [r"\langle \frac12, 100, 200\rangle", "(0.5, 100, 200)"],
    ],
    "lists": [["1, 2", "2, 1", "1 and 2", r"1 \text{ or } 2", r"\{1,2\}", "x=1 or x=2", "x = 1, 2"], ["1, 3"], ["1"], ["1, 2, 3", "3,2, and 1"]],
    "values of several names": [
        ["x=2, y=1", "y=1, x=2", "x = 2.0 and y = 1", "(2,1)"], ["1, 2"], ["x=3, y=2"], ["a=2, b=1"], ["2"], ["x=2, y=1, z=0"],
        ["a=3,b=5", "b=5,a=3", "3,5"], ["5,3"],
    ],
    "values and sets": [["x=1, y=2", "y=2, x=1", "(1,2)", "1, 2"], [r"\{1,2\}"], ["x=2, y=1", "2, 1", "(2,1)"]],
    "intervals and values": [["1 < x < 2", "(1,2)"], ["1, 2", "x=1 or x=2"], ["[1,2]"], [r"(0,1)\cup(2,3)"], ["0, 1, 2, 3"]],
    "relations in front": [
        ["5", "=5", r"\approx 5", "≈5", "5th", "5^{th}", "|AB|=5", "5=x", r"\overline{AB}=5"], [r"\ne 5"], ["<5"], ["6th", "=6"],
        ["30", r"m\angle A=30^\circ", r"\angle ABC=30^\circ", r"\measuredangle A = 30^\circ"], [r"\angle A=31^\circ"], ["12", "[ABC]=12"],
    ],
    "two signs of a sum": [[r"-\frac12, -\frac32", r"x=-1\pm\frac12", r"-1 \pm 0.5"], [r"-\frac12, \frac32"]],
    "two signs": [[r"\pm 3", "3, -3", r"\{-3, 3\}", "±3", r"x = \pm 3"], ["3"], ["-3"]],
    "times": [["10:30", r"10\!:\!30", "10 : 30", r"10{:}30", "10:30 AM", r"10:30\text{ a.m.}", "10:30 a.m."], ["1030"], ["10.30"], ["10:31"], ["9:30"],
              ["10"], ["30"]],
    "halves of the day": [["10:30 pm", "22:30", "10:30 p.m."], ["10:30 am", "10:30 a.m."], ["22:31"]],
    "ratios": [["3:4", "3 : 4", "3/4", r"\frac{3}{4}", "6:8"], ["4:3"], ["34"], ["3:5"]],
    "percentages": [["50%", r"50\%", "50 percent", r"50\text{ percent}"], ["5%"], ["60%"]],
    "small numbers": [["10^{-7}", "1e-7", r"1 \times 10^{-7}", "0.0000001"], ["2 \\cdot 10^{-7}"], ["0"], ["3e-7"]],
    "closed forms": [
        [r"10^{-20}\pi", r"\frac{\pi}{10^{20}}"], [r"2 \cdot 10^{-20}\pi"], [r"e^{\pi\sqrt{163}}"], ["262537412640768744"],
        [r"\binom{5}{2}", "10"], [r"\log_2 8", "3"], [r"\ln e^2", "2"], [r"\sin\frac{\pi}{6}", "0.5", "1/2"], [r"\frac{\pi}{2}", r"0.5\pi", "π/2"],
    ],
    "algebra": [
        ["(x+1)^2", "x^2 + 2x + 1", "1+2x+x^2"], ["x^2+1"], [r"\frac{1}{x}", "x^{-1}", "1/x"], ["x"], ["2^n - 1"], ["n^2 - 1"],
        [r"e^{1-\alpha}", r"\frac{e}{e^{\alpha}}"], [r"\sin^2 x", r"(\sin x)^2", r"1-\cos^2 x"], [r"\sqrt{x^2}", "|x|"],
    ],
    "equations": [["AB = AC", "AC = AB"], ["AB = BC"], ["y = xz", "xz = y", "y=zx"], ["y = x"], ["f(x) = c"], ["f(x) = d"]],
    "matrices": [
        [r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & \frac{8}{2} \end{pmatrix}",
         r"\begin{pmatrix} 1 & 2 \\[4pt] 3 & 4 \end{pmatrix}", r"\[\begin{pmatrix} 1 & 2 \\ [0.5ex] 3 & 4 \end{pmatrix}\]"],
        [r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"], [r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}"],
    ],
    "names": [["Q_8", "Q_{8}"], ["Q_9"], [r"\mathbb{Z}_2"], [r"\mathbb{Z}_3"], [r"\mathbb{Z}", "ℤ"], [r"\mathbb{C}"], [r"\aleph_0"], [r"\aleph_1"], ["O(n)"], ["O(n^2)"], ["n"]],
    "congruences": [[r"x \equiv 5 \pmod 7", r"x\equiv 5\pmod{7}"], [r"x \equiv 5 \pmod 8"], ["5"]],
}  # fmt: skip


NEIGHBOURS = 3


def equal_pairs() -> list[tuple[str, str, str]]:
    """Family, the first spelling of an answer, and another."""
    return [
        (family, members[0], other)
        for family, classes in FAMILIES.items()
        for members in classes
        for other in members[1:]
    ]


def different_pairs() -> list[tuple[str, str, str]]:
    """Family and two different answers, each in its first spelling: the first of a family against
    all others, and every one against those that follow it."""
    return [
        (family, left[0], right[0])
        for family, classes in FAMILIES.items()
        for (i, left), (j, right) in combinations(enumerate(classes), 2)
        if i == 0 or j - i <= NEIGHBOURS
    ]
