package budget

// account is one budget's, subject's and period's money in this process.
type account struct{}
