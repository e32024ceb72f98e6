"""Unicode signs of mathematics, and their replacements in ASCII and LaTeX."""
# ruff: noqa: RUF001

from __future__ import annotations

SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "0123456789+-ni", strict=True))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n", strict=True))
FRACTIONS = {
    "½": "12", "⅓": "13", "⅔": "23", "¼": "14", "¾": "34", "⅕": "15", "⅖": "25", "⅗": "35",
    "⅘": "45", "⅙": "16", "⅚": "56", "⅛": "18", "⅜": "38", "⅝": "58", "⅞": "78", "⅐": "17",
    "⅑": "19",
}  # fmt: skip
GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta",
    "η": "eta", "θ": "theta", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi",
    "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "ϕ": "phi", "χ": "chi",
    "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda",
    "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega", "ℓ": "ell", "ℵ": "aleph",
}  # fmt: skip
SIGNS = {
    "−": "-", "﹣": "-", "－": "-", "‐": "-", "‑": "-", "‒": "-",
    "×": "\\times ", "⋅": "\\cdot ", "·": "\\cdot ", "∙": "\\cdot ", "÷": "/", "∕": "/", "⁄": "/",
    "∛": "\\sqrt[3]", "∜": "\\sqrt[4]", "±": "\\pm ", "∓": "\\mp ", "∞": "\\infty ",
    "≤": "\\le ", "≥": "\\ge ", "⩽": "\\le ", "⩾": "\\ge ", "≠": "\\ne ", "≈": "\\approx ",
    "∪": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset ", "Ø": "\\emptyset ", "∈": "\\in ",
    "∖": "\\setminus ", "°": "^\\circ ", "º": "^\\circ ", "′": "'", "’": "'", "″": "''",
    "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℚ": "\\mathbb{Q}", "ℕ": "\\mathbb{N}",
    "ℂ": "\\mathbb{C}", "⟨": "\\langle ", "⟩": "\\rangle ", "⌊": "\\lfloor ", "⌋": "\\rfloor ",
    "⌈": "\\lceil ", "⌉": "\\rceil ", "…": "\\ldots ", "∶": ":", "：": ":", "，": ",", "％": "%",
    "（": "(", "）": ")", "＝": "=", "＋": "+", "∧": "\\land ", "∨": "\\lor ",
}  # fmt: skip
THIN = "\u2000-\u200a\u202f\u205f\u00a0"
INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u2061\u2062\u2063\u200e\u200f"
